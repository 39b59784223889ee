"""Move data between tiers, and fetch values to the host."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from harness.engine.activations import TABLE_ENTRY_BYTES, Activations
from harness.engine.batch import NUM_ROW_FIELDS, MicroBatch
from harness.engine.ops.alike import once_a_batch
from harness.machine.base import Context, Op, Work
from harness.machine.threads.arenas import tensor_of
from harness.memory.tiers import Buffer
from harness.model.spec import ModelSpec

if TYPE_CHECKING:
    from harness.memory.kv_cache import KVCache


class MicroBatchOp(Op):
    """An op on one micro-batch in its activation buffers."""

    def __init__(self, spec: ModelSpec, batch: MicroBatch, acts: Activations, layer: int | None = None) -> None:
        assert batch.num_tokens <= acts.max_tokens, f"{batch.num_tokens} tokens do not fit {acts.max_tokens}"
        self.spec, self.batch, self.acts, self.layer = spec, batch, acts, layer
        self.micro_batch = batch.index


def device_rows(ctx: Context, batch: MicroBatch, acts: Activations) -> Any:
    """Return `MicroBatch.rows` as `UploadTokens` has brought them to the device."""
    return ctx.tensor(acts.tokens, batch.rows.shape, "int64")


class UploadTokens(MicroBatchOp):
    """Copy `MicroBatch.rows` to the device, and the block tables of the sequences whose KV cache lies there."""

    kind: ClassVar[str] = "upload tokens"

    def __init__(self, spec: ModelSpec, batch: MicroBatch, acts: Activations) -> None:
        super().__init__(spec, batch, acts)
        self.writes = (acts.tokens,)
        if batch.on_device.num_decode:
            assert acts.block_tables is not None, "the activations were made without a KV cache on the device"
            self.writes = (acts.tokens, acts.block_tables)

    def work(self) -> Work:
        return Work(
            link_bytes=8 * NUM_ROW_FIELDS * self.batch.num_tokens + TABLE_ENTRY_BYTES * self.batch.on_device.num_blocks
        )

    def cost_features(self) -> tuple[float, ...]:
        return (float(self.batch.num_tokens),)

    def run(self, ctx: Context, packet: int) -> None:
        ctx.move(device_rows(ctx, self.batch, self.acts), self.batch.rows)
        blocks = self.batch.on_device.flat_blocks
        if self.acts.block_tables is not None and len(blocks):
            ctx.move(ctx.tensor(self.acts.block_tables, blocks.shape, "int32"), blocks)


class OffloadQkv(MicroBatchOp):
    """Copy what is cached of all tokens and queries of decode tokens, device -> host (MoE-Lens §6.4, CGOPipe
    OffloadQKV). Only those of sequences whose KV cache lies on the host are copied. `queries` is false where the device
    attends."""

    kind: ClassVar[str] = "offload qkv"

    def __init__(
        self, spec: ModelSpec, batch: MicroBatch, acts: Activations, layer: int, *, queries: bool = True
    ) -> None:
        super().__init__(spec, batch, acts, layer)
        self._has_queries = queries
        self.reads = (acts.q, *acts.new_kv(spec))
        self.writes = (acts.host_q, *acts.host_new_kv(spec))

    @property
    def num_queries(self) -> int:
        return self.batch.on_host.num_decode if self._has_queries else 0

    @once_a_batch(lambda op: op._has_queries)
    def work(self) -> Work:
        spec, there = self.spec, self.batch.on_host
        queries_bytes = self.num_queries * spec.cached_q_dim * spec.dtype_bytes
        rows_bytes = there.num_tokens * spec.kv_bytes_per_token_layer + queries_bytes
        return Work(device_bytes=rows_bytes, host_bytes=rows_bytes, link_bytes=rows_bytes)

    def cost_features(self) -> tuple[float, ...]:
        return (float(self.batch.on_host.num_tokens), float(self.num_queries))

    def run(self, ctx: Context, packet: int) -> None:
        spec, acts, there = self.spec, self.acts, self.batch.on_host
        if self.num_queries:
            self._move(ctx, acts.q, spec.q_row_dim, acts.host_q, spec.cached_q_dim, [there.decode])
        for piece, source, target in zip(spec.kv_pieces, acts.new_kv(spec), acts.host_new_kv(spec), strict=True):
            self._move(ctx, source, piece.dim, target, piece.dim, there.ranges)

    def _move(
        self, ctx: Context, source: Buffer, source_dim: int, target: Buffer, dim: int, ranges: Iterable[slice]
    ) -> None:
        """Copy the first `dim` numbers of rows, which are `source_dim` wide in their source."""
        n, dtype = self.batch.num_tokens, self.spec.dtype
        for rows in ranges:
            ctx.move(ctx.tensor(target, (n, dim), dtype)[rows], ctx.tensor(source, (n, source_dim), dtype)[rows, :dim])


class LoadAttention(MicroBatchOp):
    """Copy attention results of decode tokens that were computed on the host, host -> device (CGOPipe LoadH)."""

    kind: ClassVar[str] = "load attention"

    def __init__(self, spec: ModelSpec, batch: MicroBatch, acts: Activations, layer: int) -> None:
        super().__init__(spec, batch, acts, layer)
        self.reads, self.writes = (acts.host_attention,), ((acts.attention, "decode"),)

    @once_a_batch()
    def work(self) -> Work:
        nbytes = self.batch.on_host.num_decode * self.spec.cached_o_dim * self.spec.dtype_bytes
        return Work(device_bytes=nbytes, host_bytes=nbytes, link_bytes=nbytes)

    def cost_features(self) -> tuple[float, ...]:
        return (float(self.batch.on_host.num_decode),)

    def run(self, ctx: Context, packet: int) -> None:
        spec, n, rows = self.spec, self.batch.num_tokens, self.batch.on_host.decode
        source = ctx.tensor(self.acts.host_attention, (n, spec.cached_o_dim), spec.dtype)
        target = ctx.tensor(self.acts.attention, (n, spec.o_row_dim), spec.dtype)
        ctx.move(target[rows, : spec.cached_o_dim], source[rows])


class LoadKv(MicroBatchOp):
    """Copy what is cached of decoding sequences, host blocks -> contiguous device staging, some at a time.

    Staging layout: for each entry of `KvReads` one piece of the cache after another, each [num_heads, tokens, width].
    The newest token's place is filled with whatever the cache holds there, so that a sequence is one contiguous copy.
    Its rows are on the device already, and so the rest can be fetched before they are computed.
    """

    kind: ClassVar[str] = "load kv"

    def __init__(
        self, spec: ModelSpec, batch: MicroBatch, acts: Activations, layer: int, cache: KVCache, rows: range, to: Buffer
    ) -> None:
        super().__init__(spec, batch, acts, layer)
        self.cache, self.rows, self.to, self.there = cache, rows, to, batch.on_host
        self.reads = tuple(cache.region(layer, p) for p in batch.partitions)
        self.writes = (to,)

    @property
    def _num_tokens(self) -> int:
        return int(self.there.read_lens[self.rows.start : self.rows.stop].sum())

    def work(self) -> Work:
        nbytes = self._num_tokens * self.spec.kv_bytes_per_token_layer
        return Work(device_bytes=nbytes, host_bytes=nbytes, link_bytes=nbytes)

    def cost_features(self) -> tuple[float, ...]:
        return (float(len(self.rows)), float(self._num_tokens))

    def run(self, ctx: Context, packet: int) -> None:
        assert self.layer is not None
        pieces, token_dim = self.cache.views(ctx, self.layer), sum(piece.dim for piece in self.cache.pieces)
        reads = self.there.reads.among(self.rows.start, self.rows.stop)
        staging = ctx.tensor(self.to, (self._num_tokens * token_dim,), self.spec.dtype)
        ctx.gather(staging, pieces, tensor_of(reads.tables), tensor_of(reads.lens))


class StageKv(LoadKv):
    """Copy what is cached of decoding sequences to pinned memory, as from a pageable cache: host memory is read and
    written. The layout is that of `LoadKv`."""

    kind: ClassVar[str] = "kv to pinned"

    def work(self) -> Work:
        nbytes = super().work().link_bytes
        return Work(host_bytes=2 * nbytes, link_bytes=nbytes)


class LoadStagedKv(LoadKv):
    """Copy what `StageKv` has brought to pinned memory, pinned memory -> device staging, in one piece."""

    def __init__(
        self,
        spec: ModelSpec,
        batch: MicroBatch,
        acts: Activations,
        layer: int,
        cache: KVCache,
        rows: range,
        to: Buffer,
        *,
        source: Buffer,
    ) -> None:
        super().__init__(spec, batch, acts, layer, cache, rows, to)
        self.source = source
        self.reads = (source,)

    def run(self, ctx: Context, packet: int) -> None:
        ctx.copy(self.to, self.source, 0, int(self.work().link_bytes))


class OffloadHidden(MicroBatchOp):
    """Copy hidden states, device -> pinned memory, where they wait for the micro-batch's turn in the next layer."""

    kind: ClassVar[str] = "offload hidden"

    def __init__(self, spec: ModelSpec, batch: MicroBatch, acts: Activations, layer: int, kept: Buffer) -> None:
        super().__init__(spec, batch, acts, layer)
        self.source, self.target = acts.hidden, kept
        self.reads, self.writes = (self.source,), (self.target,)

    def work(self) -> Work:
        nbytes = self.batch.num_tokens * self.spec.hidden_dim * self.spec.dtype_bytes
        return Work(device_bytes=nbytes, host_bytes=nbytes, link_bytes=nbytes)

    def cost_features(self) -> tuple[float, ...]:
        return (float(self.batch.num_tokens),)

    def run(self, ctx: Context, packet: int) -> None:
        shape = (self.batch.num_tokens, self.spec.hidden_dim)
        source = ctx.tensor(self.source, shape, self.spec.dtype)
        ctx.move(ctx.tensor(self.target, shape, self.spec.dtype), source)


class LoadHidden(OffloadHidden):
    """Copy hidden states back, pinned memory -> device."""

    kind: ClassVar[str] = "load hidden"

    def __init__(self, spec: ModelSpec, batch: MicroBatch, acts: Activations, layer: int, kept: Buffer) -> None:
        super().__init__(spec, batch, acts, layer, kept)
        self.source, self.target = kept, acts.hidden
        self.reads, self.writes = (self.source,), (self.target,)


class FetchSampled(MicroBatchOp):
    """Fetch sampled token ids to the host; value: int64 [sequences]."""

    kind: ClassVar[str] = "fetch tokens"

    def __init__(self, spec: ModelSpec, batch: MicroBatch, acts: Activations) -> None:
        super().__init__(spec, batch, acts)
        self.reads = (acts.sampled,)

    def work(self) -> Work:
        return Work(link_bytes=8 * self.batch.num_sequences)

    def cost_features(self) -> tuple[float, ...]:
        return (float(self.batch.num_sequences),)

    def run(self, ctx: Context, packet: int) -> Any:
        return ctx.host_value(ctx.tensor(self.acts.sampled, (self.batch.num_sequences,), "int64"))

    def imagine(self, world: Any) -> Any:
        return world.sampled(self.batch)


class RecordedLayer(NamedTuple):
    """A recorded layer says what its router did with a micro-batch."""

    expert_ids: np.ndarray  # int64 [tokens, experts_per_token]
    weights: np.ndarray | None  # float32, of the same shape, where they are recorded
    inputs: list[np.ndarray]  # uint8 [rows, bytes of a row] for each of `MicroBatch.sampled_runs`


class FetchRouting(MicroBatchOp):
    """Fetch the router's choices to the host and, of what the micro-batch's sequences record, their weights and the
    router's input; value: `RecordedLayer`. A machine without tensors has the choices alone."""

    kind: ClassVar[str] = "fetch routing"

    def __init__(self, spec: ModelSpec, batch: MicroBatch, acts: Activations, layer: int) -> None:
        super().__init__(spec, batch, acts, layer)
        self.reads = (acts.expert_ids,)
        if batch.records_weights:
            self.reads += (acts.expert_weights,)
        if batch.sampled_runs:
            self.reads += (acts.normed,)

    def work(self) -> Work:
        choice_bytes = 12 if self.batch.records_weights else 8
        inputs_bytes = len(self.batch.sampled_rows) * self.spec.hidden_dim * self.spec.dtype_bytes
        return Work(link_bytes=choice_bytes * self.batch.num_tokens * self.spec.experts_per_token + inputs_bytes)

    def cost_features(self) -> tuple[float, ...]:
        return (float(self.batch.num_tokens),)

    def run(self, ctx: Context, packet: int) -> Any:
        weights = self._choices(ctx, self.acts.expert_weights, "float32") if self.batch.records_weights else None
        inputs = []
        if self.batch.sampled_runs:
            shape = (self.batch.num_tokens, self.spec.hidden_dim * self.spec.dtype_bytes)
            normed = ctx.tensor(self.acts.normed, shape, "uint8")  # numpy has no bfloat16
            inputs = [ctx.host_value(normed[rows]) for rows in self.batch.sampled_runs]
        return RecordedLayer(self._choices(ctx, self.acts.expert_ids, "int64"), weights, inputs)

    def _choices(self, ctx: Context, source: Buffer, dtype: str) -> np.ndarray:
        shape = (self.batch.num_tokens, self.spec.experts_per_token)
        found: np.ndarray = ctx.host_value(ctx.tensor(source, shape, dtype))
        return found

    def imagine(self, world: Any) -> Any:
        return RecordedLayer(world.routing(self.batch, self.layer), None, [])


class FetchRoute(FetchRouting):
    """Fetch the router's choices and their weights to the host; value: int64 and float32 [tokens,
    experts_per_token]."""

    kind: ClassVar[str] = "fetch route"

    def __init__(self, spec: ModelSpec, batch: MicroBatch, acts: Activations, layer: int) -> None:
        super().__init__(spec, batch, acts, layer)
        self.reads = (acts.expert_ids, acts.expert_weights)

    def work(self) -> Work:
        return Work(link_bytes=12 * self.batch.num_tokens * self.spec.experts_per_token)

    @property
    def cost_key(self) -> str:
        """The kind under which calibrations measure it: `FetchRouting`, which lacks the 4 bytes of each choice's
        weight. Their time over the link is counted by rate."""
        return FetchRouting.kind

    def run(self, ctx: Context, packet: int) -> Any:
        ids = self._choices(ctx, self.acts.expert_ids, "int64")
        return ids, self._choices(ctx, self.acts.expert_weights, "float32")

    def imagine(self, world: Any) -> Any:
        return world.route(self.batch, self.layer)
