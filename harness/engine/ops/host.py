"""Run the ops of the cpu lane: the paged KV cache and attention over it, with the C++ kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import kernels
from harness.engine.activations import Activations
from harness.engine.batch import CachedRows, KvReads, MicroBatch
from harness.engine.ops.alike import once_a_batch
from harness.engine.ops.attention_rows import cached_queries, cached_results
from harness.engine.ops.data import MicroBatchOp
from harness.engine.ops.views import attend_each, attention_weights
from harness.machine.base import Context, Work
from harness.machine.threads.arenas import tensor_of
from harness.memory.placed import PlacedPart
from harness.memory.tiers import Buffer
from harness.model.spec import ModelSpec

if TYPE_CHECKING:
    from harness.memory.kv_cache import KVCache
    from harness.model.functional import AttentionOptions


class KvOp(MicroBatchOp):
    """An op on one layer of a KV cache."""

    def __init__(self, spec: ModelSpec, batch: MicroBatch, acts: Activations, layer: int, cache: KVCache) -> None:
        super().__init__(spec, batch, acts, layer)
        self.cache = cache
        self.kv_keys = tuple(cache.region(layer, p) for p in batch.partitions)

    def cached(self, ctx: Context) -> tuple[Any, ...]:
        """Return the layer's pieces of the cache, each [blocks, num_heads, block_size, width]."""
        assert self.layer is not None
        return self.cache.views(ctx, self.layer)

    def new_rows(self, ctx: Context, buffers: tuple[Buffer, ...]) -> list[Any]:
        """Return what these buffers hold of the new tokens for each piece, [tokens, num_heads, width]."""
        n, dtype = self.batch.num_tokens, self.spec.dtype
        return [
            ctx.tensor(buffer, (n, piece.num_heads, piece.width), dtype)
            for piece, buffer in zip(self.cache.pieces, buffers, strict=True)
        ]


class AppendKv(KvOp):
    """Writes the rows of new tokens into their blocks, for all tokens whose cache lies in host memory."""

    kind: ClassVar[str] = "append kv"

    def __init__(self, spec: ModelSpec, batch: MicroBatch, acts: Activations, layer: int, cache: KVCache) -> None:
        super().__init__(spec, batch, acts, layer, cache)
        self.reads, self.writes = acts.host_new_kv(spec), self.kv_keys

    @once_a_batch()
    def work(self) -> Work:
        return Work(host_bytes=2 * self.batch.on_host.num_tokens * self.spec.kv_bytes_per_token_layer)

    def cost_features(self) -> tuple[float, ...]:
        return (float(self.batch.on_host.num_tokens),)

    def run(self, ctx: Context, packet: int) -> None:
        new, cached = self.new_rows(ctx, self.acts.host_new_kv(self.spec)), self.cached(ctx)
        slots = tensor_of(self.batch.slots)
        for rows in self.batch.on_host.ranges:
            _append([piece[rows] for piece in new], cached, slots[rows], ctx.num_threads())


def _append(new: list[Any], cached: tuple[Any, ...], slots: Any, num_threads: int) -> None:
    """Scatter rows with the kernel for two pieces of the same shape, or for one whose row all heads share."""
    if len(cached) == 2:
        (k, v), (k_cache, v_cache) = new, cached
        kernels.kv_append(k, v, k_cache, v_cache, slots, num_threads=num_threads)
    else:
        [latent], [latent_cache] = new, cached
        kernels.latent_append(latent.squeeze(1), latent_cache.squeeze(1), slots, num_threads=num_threads)


class AttentionOverCache(KvOp):
    """Computes attention of each decoding sequence's newest token over its whole context. `part` has the layer's
    `attention_part` on the side where the op runs; None where the family has none."""

    def __init__(
        self,
        family: Any,
        spec: ModelSpec,
        batch: MicroBatch,
        acts: Activations,
        layer: int,
        cache: KVCache,
        part: PlacedPart | None,
    ) -> None:
        super().__init__(spec, batch, acts, layer, cache)
        self.family, self.part = family, part
        self.attention_keys = part.keys if part else ()

    def num_seen_tokens(self, there: CachedRows) -> int:
        assert self.layer is not None
        return there.num_seen_tokens(self.spec, self.layer)

    def options(self, ctx: Context) -> AttentionOptions:
        return self.family.attention_options(self.spec, attention_weights(ctx, self.part), self.layer)


class DecodeAttention(AttentionOverCache):
    """Computes attention on the cpu lane over the host cache."""

    kind: ClassVar[str] = "decode attention"

    def __init__(
        self,
        family: Any,
        spec: ModelSpec,
        batch: MicroBatch,
        acts: Activations,
        layer: int,
        cache: KVCache,
        part: PlacedPart | None,
    ) -> None:
        super().__init__(family, spec, batch, acts, layer, cache, part)
        self.reads = (acts.host_q, *self.kv_keys, *self.attention_keys)
        self.writes = (acts.host_attention,)

    @once_a_batch(lambda op: op.spec.window(op.layer))
    def work(self) -> Work:
        tokens = self.num_seen_tokens(self.batch.on_host)
        flops = tokens * self.spec.decode_pair_flops
        return Work(flops=flops, host_bytes=tokens * self.spec.kv_bytes_per_token_layer)

    def cost_features(self) -> tuple[float, ...]:
        return (float(self.batch.on_host.num_decode), float(self.num_seen_tokens(self.batch.on_host)))

    def run(self, ctx: Context, packet: int) -> None:
        spec, n, here = self.spec, self.batch.num_tokens, self.batch.on_host
        q = cached_queries(ctx, spec, self.acts.host_q, n, spec.cached_q_dim)[here.decode]
        out = cached_results(ctx, spec, self.acts.host_attention, n, spec.cached_o_dim)[here.decode]
        paged_attention(self.options(ctx), q, self.cached(ctx), here.reads, out, num_threads=ctx.num_threads())


def staged_attention(options: AttentionOptions, spec: ModelSpec, q: Any, staging: Any, lens: Any, out: Any) -> None:
    """Run the kernel for sequences of `lens` tokens that `LoadKv` staged, where host memory plays device memory: q and
    out [seqs, heads, width]."""
    if spec.latent is not None:
        assert options.window is None and options.sinks is None, "attention over latents has neither"
        kernels.staged_latent_attention(q, staging, tensor_of(lens), out, scale=options.scale)
        return
    kernels.staged_attention(
        q, staging, tensor_of(lens), out, num_kv_heads=spec.num_kv_heads, scale=options.scale,
        sliding_window=options.window or 0, sinks=options.sinks,
    )  # fmt: skip


def paged_attention(
    options: AttentionOptions, q: Any, cached: tuple[Any, ...], reads: KvReads, out: Any, *, num_threads: int = 1
) -> None:
    """Run the paged kernel for the pieces of a cache: q and out [decode, heads, width]."""

    def attend(q: Any, out: Any) -> None:
        tables, lens = tensor_of(reads.tables), tensor_of(reads.lens)
        if len(cached) == 1:
            assert options.window is None and options.sinks is None, "attention over latents has neither"
            [latent] = cached
            kernels.latent_attention(
                q, latent.squeeze(1), tables, lens, out, scale=options.scale, num_threads=num_threads
            )
            return
        keys, values = cached
        kernels.decode_attention(
            q,
            keys,
            values,
            tables,
            lens,
            out,
            scale=options.scale,
            sliding_window=options.window or 0,
            sinks=options.sinks,
            num_threads=num_threads,
        )

    attend_each(reads, q, out, attend)
