"""Run ops of the gpu lane over a KV cache in device memory: no key and no value crosses the link."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from harness.engine.activations import Activations
from harness.engine.batch import MicroBatch
from harness.engine.ops import on_gpu
from harness.engine.ops.attention_rows import cached_queries, cached_results, keys_and_values
from harness.engine.ops.data import device_rows
from harness.engine.ops.host import AttentionOverCache, KvOp, paged_attention
from harness.engine.ops.views import attend_each, attention_weights
from harness.machine.base import Context, Work
from harness.memory.placed import PlacedPart
from harness.model.spec import ModelSpec

if TYPE_CHECKING:
    from harness.memory.kv_cache import KVCache


class AppendKvOnDevice(KvOp):
    """Writes the rows of new tokens into their blocks, for all tokens whose cache lies in device memory."""

    kind: ClassVar[str] = "append kv (device)"

    def __init__(self, spec: ModelSpec, batch: MicroBatch, acts: Activations, layer: int, cache: KVCache) -> None:
        super().__init__(spec, batch, acts, layer, cache)
        self.reads, self.writes = (acts.tokens, *acts.new_kv(spec)), self.kv_keys

    def work(self) -> Work:
        return Work(device_bytes=2 * self.batch.on_device.num_tokens * self.spec.kv_bytes_per_token_layer)

    def cost_features(self) -> tuple[float, ...]:
        return (float(self.batch.on_device.num_tokens),)

    def run(self, ctx: Context, packet: int) -> None:
        block_size = self.cache.block_size
        slots = device_rows(ctx, self.batch, self.acts)[2]
        both = list(zip(self.new_rows(ctx, self.acts.new_kv(self.spec)), self.cached(ctx), strict=True))
        if on_gpu.appends(slots):
            return on_gpu.append(both, slots, self.batch.on_device.ranges)
        blocks, inside = slots // block_size, slots % block_size
        for new, target in both:
            for rows in self.batch.on_device.ranges:
                target[blocks[rows], :, inside[rows]] = new[rows]


class DecodeAttentionPaged(AttentionOverCache):
    """Computes attention on the gpu lane over the device's cache."""

    kind: ClassVar[str] = "decode attention (paged)"

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
        assert acts.block_tables is not None, "the activations were made without a KV cache on the device"
        self.tables = acts.block_tables
        self.reads = (acts.tokens, self.tables, acts.q, *self.kv_keys, *self.attention_keys)
        self.writes = ((acts.attention, "decode on device"),)

    def work(self) -> Work:
        tokens = self.num_seen_tokens(self.batch.on_device)
        flops = tokens * self.spec.decode_pair_flops
        return Work(flops=flops, device_bytes=tokens * self.spec.kv_bytes_per_token_layer)

    def cost_features(self) -> tuple[float, ...]:
        return (float(self.batch.on_device.num_decode), float(self.num_seen_tokens(self.batch.on_device)))

    def run(self, ctx: Context, packet: int) -> None:
        spec, n, mine = self.spec, self.batch.num_tokens, self.batch.on_device.decode
        q = cached_queries(ctx, spec, self.acts.q, n, spec.q_row_dim)[mine]
        out = cached_results(ctx, spec, self.acts.attention, n, spec.o_row_dim)[mine]
        if on_gpu.attends(q):
            self._by_gpu_kernel(ctx, q, self.cached(ctx), out)
        else:
            (self.by_kernel if q.device.type == "cpu" else self.by_family)(ctx, q, self.cached(ctx), out)

    def _by_gpu_kernel(self, ctx: Context, q: Any, cached: tuple[Any, ...], out: Any) -> None:
        """Attend for all sequences in one launch. Only the host knows blocks and positions of shadows."""
        here = self.batch.on_device
        positions = device_rows(ctx, self.batch, self.acts)[1, here.decode]
        blocks = ctx.tensor(self.tables, here.flat_blocks.shape, "int32")
        if here.reads.num_shadows:
            positions, blocks = (on_gpu.numbers(x, q.device) for x in (here.reads.positions, here.reads.flat_blocks))
        options = self.options(ctx)

        def attend(q: Any, out: Any) -> None:
            if len(cached) == 1:
                return on_gpu.paged_latent_attention(options, q, cached[0], blocks, positions, out)
            keys, values = cached
            return on_gpu.paged_attention(options, q, keys, values, blocks, positions, out)

        attend_each(here.reads, q, out, attend)

    def by_kernel(self, ctx: Context, q: Any, cached: tuple[Any, ...], out: Any) -> None:
        """Run the paged kernel, on one thread, where host memory plays device memory."""
        paged_attention(self.options(ctx), q, cached, self.batch.on_device.reads, out)

    def by_family(self, ctx: Context, q: Any, cached: tuple[Any, ...], out: Any) -> None:
        """Run the family's own math, sequence by sequence, for a GPU that Triton does not serve."""
        reads, w = self.batch.on_device.reads, attention_weights(ctx, self.part)

        def attend(q: Any, out: Any) -> None:
            for entry, length in enumerate(reads.lens.tolist()):
                found = self._attend(w, q[entry], cached, reads.tables[entry], length)
                out[entry] = found.view(out[entry].shape)

        attend_each(reads, q, out, attend)

    def _attend(self, w: Any, q: Any, cached: tuple[Any, ...], table: np.ndarray, length: int) -> Any:
        blocks = table[: -(-length // self.cache.block_size)].tolist()
        pieces = [x[blocks].transpose(0, 1).reshape(x.shape[1], -1, x.shape[3]) for x in cached]
        k, v = keys_and_values(self.spec, pieces)
        return self.family.decode_attention(self.spec, w, q, k, v, length, self.layer)
