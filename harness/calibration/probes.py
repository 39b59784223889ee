"""Submits the chains of ops that calibration measures: all that a layer has on any lane, for chosen micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from harness.bench.op_bench import OpBench
from harness.bench.shapes import Shape
from harness.calibration.fills import Fill, FillRoutes
from harness.engine.activations import Activations
from harness.engine.emitter import Emitter, InFlight
from harness.engine.engine import Engine
from harness.engine.ops import data, expert_rows, paged
from harness.engine.ops.experts import Expert
from harness.engine.ops.predictions import PredictExperts
from harness.machine.base import CPU, D2H, GPU, H2D, PIN
from harness.memory.kv_cache import KVCache
from harness.memory.placed import PlacedPart
from harness.memory.tiers import DEVICE, Buffer
from harness.memory.transfers import StagePage
from harness.memory.weights import WeightStream
from harness.model.spec import ModelSpec

Chain = Callable[[Emitter, InFlight, int], None]  # submits a micro-batch's ops of one layer
Pair = tuple[InFlight, InFlight]  # the second one finds weights that the first one has just read
_HOST_EXPERTS = 3  # that one chain runs on the cpu lane
_FEW_TOKENS = 100  # of a micro-batch whose experts all run on the cpu lane besides, together
_MOST_DRAWS = 6  # of these: a wait for a core, now and then, takes as long as the experts of a few tokens
_CACHE_BYTES_A_TABLE_BYTE = 250  # of block tables for a cache and two micro-batches, with blocks of 2 KB or more
_MOST_TOKENS = 30_000  # more than the contexts of any shape that is measured have, with what blocks round up


@dataclass(frozen=True)
class ContextRoom:
    """Device memory for contexts of probed ops: keys and values of one layer that are staged there, and a cache of all
    layers. Contexts that take more are not probed on the device."""

    staging_bytes: int = 4_000_000
    cache_bytes: int = 16_000_000

    @classmethod
    def of(cls, engine: Engine) -> ContextRoom:
        """Return a 64th and a 16th of the device's memory, but no more than all shapes need and no less than the
        least."""
        least, device_bytes = cls(), engine.machine.tiers["device"].capacity_bytes
        most_bytes = _MOST_TOKENS * engine.spec.kv_bytes_per_token
        return cls(
            max(least.staging_bytes, min(device_bytes // 64, most_bytes // engine.spec.num_layers)),
            max(least.cache_bytes, min(device_bytes // 16, most_bytes)),
        )

    @property
    def reserved_bytes(self) -> int:
        """Return the bytes beside layers and activations, block tables included."""
        return self.staging_bytes + self.cache_bytes + self.cache_bytes // _CACHE_BYTES_A_TABLE_BYTE


class LayerProbes:
    """Holds device memory for two layers and two micro-batches of `max_tokens`, and submits ops over them. `close`
    gives the memory back; what the engine's cache held is lost.

    Ops of a single layer are those of `layer`, the first one with experts, which is its index in the stream too; where
    only some layers have windows, the first without one. Where the link is to be busy meanwhile, it brings what lies at
    `beside` in the stream. `chains` names all that chains of ops begin with, each with whether its experts are apart:
    `layer`, and the first dense layer where there is one.
    """

    @staticmethod
    def pinned_bytes(engine: Engine, max_tokens: int) -> int:
        """Return the bytes of pinned memory beside activations: kept rows and their float32 sums, and a staged part."""
        spec, part = engine.spec, engine.store.layers[0]["attention_in"].layout
        return max_tokens * spec.hidden_dim * (spec.dtype_bytes + 4) + part.nbytes

    def __init__(self, engine: Engine, *, room: ContextRoom, max_tokens: int, packet_bytes: int) -> None:
        self.engine = engine
        self.packet_bytes = packet_bytes
        machine, spec = engine.machine, engine.spec
        self.layer = next((layer for layer in spec.moe_layers if spec.window(layer) is None), spec.moe_layers[0])
        self.beside = _index_beside(spec, self.layer)
        self.chains = [(self.layer, False), (self.layer, True), *((layer, False) for layer in spec.dense_layers[:1])]
        self.stream = WeightStream(machine, engine.store, depth=2, packet_bytes=packet_bytes, name="bench slot")
        block_size = engine.kv.allocator.block_size
        self.kv = KVCache(machine, spec, capacity_bytes=room.cache_bytes, block_size=block_size, tier=DEVICE)
        blocks = self.kv.num_device_blocks
        self.acts = [
            Activations(
                machine,
                spec,
                max_tokens=max_tokens,
                name=f"bench {i}",
                host_experts=True,
                device_blocks=blocks,
                num_predicted=spec.experts_per_token,
            )
            for i in (0, 1)
        ]
        for cache in filter(None, (self.kv, engine.kv.host)):
            for layer in range(len(cache.layers)):
                machine.submit(GPU if cache.on_device else CPU, Fill(cache, layer))
        machine.drain()
        self.kept = machine.tiers["pinned"].reserve(
            "bench kept hidden", max_tokens * spec.hidden_dim * spec.dtype_bytes
        )
        self.sums = machine.tiers["pinned"].reserve("bench sums of rows", max_tokens * spec.hidden_dim * 4)
        self.staging = machine.tiers["device"].reserve("bench kv staging", room.staging_bytes)
        self.staged = self._pageable_part()
        self._in_device_kv: tuple[InFlight, InFlight] | None = None  # see `pair`
        self.ops = OpBench(engine, self.stream, self.acts)
        self._next_expert = 0

    def _pageable_part(self) -> tuple[PlacedPart, Buffer] | None:
        """Reserve a part in pageable memory and the pinned place it is staged into. Returns None where there is no
        pageable memory."""
        tiers, layout = self.engine.machine.tiers, self.engine.store.layers[0]["attention_in"].layout
        if "host" not in tiers or tiers["host"].free_bytes < layout.nbytes:
            return None
        source = tiers["host"].reserve("bench pageable", layout.nbytes)
        target = tiers["pinned"].reserve("bench staged", layout.nbytes)
        return PlacedPart(layout, source, (source,)), target

    def stage(self) -> StagePage:
        """Return an op that copies the pageable part, for the pin lane."""
        assert self.staged is not None, "the machine has pageable memory"
        part, target = self.staged
        return StagePage(part.buffer, target, nbytes=target.nbytes, layer=0, packet_bytes=self.packet_bytes)

    def pair(self, shape: Shape) -> Pair:
        """Return two micro-batches alike. A third one, like the first but with its cache in device memory, is kept if
        it fits there."""
        first, second = self.batch(0, shape), self.batch(1, shape)
        blocks = self.kv.allocator
        needed = sum(blocks.blocks_for(length) for length in (*shape.prompts, *shape.contexts))
        fits = needed <= blocks.num_blocks
        self._in_device_kv = (first, self.ops.place(self.ops.batch(shape, blocks, on_device=True))) if fits else None
        return first, second

    def batch(self, index: int, shape: Shape) -> InFlight:
        """Return a micro-batch in the `index`-th activation buffers. Its blocks are scattered over the engine's cache,
        without regard to who holds them, and its tokens choose experts in turn until a router says otherwise."""
        machine = self.engine.machine
        machine.wait(machine.submit(GPU, FillRoutes(self.engine.spec, self.acts[index])))
        return self.ops.place(self.ops.batch(shape, self.engine.kv.allocator, index=index))

    def serial(self, emit: Emitter, its: Pair, layer: int, *, experts_apart: bool) -> None:
        """Submit one layer with nothing overlapped. Each part is transferred when its turn comes, used by one
        micro-batch and then by the other, and dropped, so that ops find weights and caches as they are after a wait.
        `emit` is a serial emitter."""

        def load(name: str) -> PlacedPart:
            emit.load(self.stream, layer, name)
            return self.stream.part(layer, name)

        self._chain(emit, its, layer, load, experts_apart=experts_apart, serial=True)
        for name in self.stream.part_names(layer):
            self.stream.release(layer, name)

    def overlapped(self, emit: Emitter, its: Pair, first: int, num_layers: int, *, experts_apart: bool) -> None:
        """Submit layer after layer, from `first` on, while the weights of the next ones are on their way, as in every
        overlapping strategy. Weights are freshly written and the link is busy, the host's other lanes are not; the
        second micro-batch uses the same weights again."""
        indices = range(first, first + num_layers)
        for index in indices[: self.stream.depth]:
            self.stream.request_layer(index)
        for index in indices:
            self._chain(emit, its, index, partial(self.stream.part, index), experts_apart=experts_apart)
            for name in self.stream.part_names(index):
                self.stream.advance(index, name)

    def _chain(
        self, emit: Emitter, its: Pair, index: int, part: Callable[[str], PlacedPart], *, experts_apart: bool,
        serial: bool = False,
    ) -> None:  # fmt: skip
        """Submit layer `index` of the stream, each part for one micro-batch and then for the other. Where `serial`, all
        that a layer has on the host's lanes is submitted too."""
        layer, parts = self.stream.layer(index), part("attention_in")
        for it in its:
            emit.attention_in(it, layer, parts)
        for it in its:
            emit.prefill_attention(it, layer)
            if serial:
                self.around_attention(emit, it, layer)
            self.device_attention(emit, it, layer)
        parts = part("attention_out")
        for it in its:
            emit.attention_out(it, layer, parts)
            self.predict(emit, it, layer, parts)
        if serial and layer == self.layer:
            self._on_host(emit, its[0])
        stored = self.engine.store.experts(layer)
        for group in [[number] for number in stored] if experts_apart else [list(stored)]:
            experts = {number: part(stored[number].layout.name) for number in group}
            for it in its:
                self.experts(emit, it, layer, experts)
        emit.combine(its[0], layer)

    def experts(self, emit: Emitter, it: InFlight, layer: int, experts: dict[int, PlacedPart]) -> None:
        """Submit experts of a layer to the gpu lane in one op, which finds its rows. A single one of odd number has as
        many as under even routing, given by who submits it."""
        odd = [part for number, part in experts.items() if number % 2]
        if len(experts) != 1 or not odd:
            emit.experts(it, layer, experts)
            return
        op = self._expert(odd[0], it.acts.normed, it.acts.moe_out, self._even_rows(it))
        op.micro_batch, op.layer = it.batch.index, layer
        emit.submit(GPU, op)

    def _even_rows(self, it: InFlight) -> int:
        """Return the tokens of a micro-batch that an expert gets under even routing, rounded up."""
        spec = self.engine.spec
        return -(-it.batch.num_tokens * spec.experts_per_token // spec.num_experts)

    def predict(self, emit: Emitter, it: InFlight, layer: int, part: PlacedPart) -> None:
        """Predict by a router, that of the layer itself: another layer's takes as long."""
        spec, following = self.engine.spec, layer + 1
        routers = (spec.is_dense(each) for each in (layer, following))
        if following < spec.num_layers and not any(routers):
            emit.submit(GPU, PredictExperts(self.engine.family, spec, it.batch, it.acts, part, layer, 1))

    def around_attention(self, emit: Emitter, it: InFlight, layer: int) -> None:
        """Submit what a layer has on lanes other than the gpu's."""
        emit.offload_qkv(it, layer)
        emit.append_kv(it, layer)
        emit.decode_attention(it, layer)
        emit.fetch_routing(it, layer)
        emit.offload_hidden(it, layer, self.kept)
        emit.load_hidden(it, layer, self.kept)
        emit.submit(D2H, expert_rows.OffloadExpertInput(self.engine.spec, it.batch, it.acts, layer))
        emit.load_expert_sums(it, layer, to=it.acts.moe_out)

    def device_attention(self, emit: Emitter, it: InFlight, layer: int) -> None:
        """Submit the decode attention of the gpu lane, with keys and values over the link or in device memory. Contexts
        that are too long are left out."""
        if self.fits_staging(it):
            emit.decode_attention_on_device(it, layer, [self.staging])
        if (placed := self.in_device_memory(it)) is not None:
            emit.upload_tokens(placed)
            self.attend_in_device_memory(emit, placed, layer)

    def in_device_memory(self, it: InFlight) -> InFlight | None:
        """Return the micro-batch that is like `it` with its cache in device memory, if there is one."""
        return self._in_device_kv[1] if self._in_device_kv is not None and self._in_device_kv[0] is it else None

    def attend_in_device_memory(self, emit: Emitter, it: InFlight, layer: int) -> None:
        """Submit the ops over the cache of a micro-batch that has it in device memory."""
        spec = self.engine.spec
        emit.submit(GPU, paged.AppendKvOnDevice(spec, it.batch, it.acts, layer, self.kv))
        if it.batch.on_device.num_decode:
            family, part = self.engine.family, self.engine.resident.attention[layer]
            emit.submit(GPU, paged.DecodeAttentionPaged(family, spec, it.batch, it.acts, layer, self.kv, part))

    def host_side(self, emit: Emitter, it: InFlight, layer: int) -> None:
        """Submit all that a pass has on lanes other than the gpu's, once. `emit` is a serial emitter."""
        spec, cache = self.engine.spec, self.engine.kv.host
        assert cache is not None, "calibration attends over a cache in host memory"
        emit.submit(H2D, data.UploadTokens(spec, it.batch, it.acts), urgent=True)
        self.around_attention(emit, it, layer)
        if self.fits_staging(it):
            rows = range(len(it.batch.decode))
            emit.submit(H2D, data.LoadKv(spec, it.batch, it.acts, layer, cache, rows, self.staging), urgent=True)
        emit.submit(D2H, data.FetchSampled(spec, it.batch, it.acts), urgent=True)
        self._on_host(emit, it)

    def _on_host(self, emit: Emitter, it: InFlight) -> None:
        """Submit experts over their share of a micro-batch's tokens and what an accumulated batch has around them.

        Where the machine has pageable memory, a copy into pinned memory follows.
        """
        spec, num_tokens = self.engine.spec, it.batch.num_tokens
        share = self._even_rows(it)
        source, target = self.acts[0].host_normed, self.acts[0].host_moe_out
        for _ in range(_HOST_EXPERTS):
            emit.submit(CPU, self.expert_on_host(share))
        emit.experts_on_host(it, self.layer, None if num_tokens <= _FEW_TOKENS else [0, 1])
        for _ in range(min(_FEW_TOKENS // num_tokens, _MOST_DRAWS) - 1):
            emit.experts_on_host(it, self.layer, range(spec.num_experts))
        emit.experts_on_host(it, self.layer, [spec.num_experts - 1])  # without tokens where these are few
        tokens, ones = np.arange(share), np.ones(share, dtype=np.float32)
        emit.submit(CPU, expert_rows.ClearSums(spec, self.sums, num_tokens, self.layer))
        emit.submit(CPU, expert_rows.Gather(spec, source, self.kept, tokens, self.layer))
        emit.submit(CPU, expert_rows.AddWeighted(spec, target, self.sums, tokens, ones, self.layer))
        if self.staged is not None:
            emit.submit(PIN, self.stage())

    def expert_on_host(self, num_rows: int) -> Expert:
        """Return an op for the cpu lane that runs an expert, each time another one, over so many rows of the first
        micro-batch."""
        acts = self.acts[0]
        return self._expert(self._stored_expert(), acts.host_normed, acts.host_moe_out, num_rows, on_host=True)

    def expert_on_device(self, num_rows: int) -> Expert:
        """Return an op for the gpu lane like that of `expert_on_host`, of the layer that the stream holds, over rows of
        the second micro-batch."""
        experts = self.stream.experts(self.layer)
        self._next_expert += 1
        return self._expert(
            list(experts.values())[self._next_expert % len(experts)],
            self.acts[1].normed,
            self.acts[1].moe_out,
            num_rows,
        )

    def _expert(
        self, part: PlacedPart, source: Buffer, target: Buffer, num_rows: int, *, on_host: bool = False
    ) -> Expert:
        tokens, weights = np.arange(num_rows), np.full(num_rows, 1e-3, dtype=np.float32)
        return Expert(
            self.engine.family, self.engine.spec, part, source, target, num_rows, layer=self.layer, tokens=tokens,
            weights=weights, on_host=on_host,
        )  # fmt: skip

    def gpu_side(self, emit: Emitter, it: InFlight, layer: int) -> None:
        """Submit what a layer, whose weights the stream holds, has on the gpu lane, with experts apart."""
        self._before_experts(emit, it, layer)
        for number, placed in self.stream.experts(layer).items():
            self.experts(emit, it, layer, {number: placed})
        emit.combine(it, layer)

    def gpu_side_together(self, emit: Emitter, it: InFlight, layer: int) -> None:
        """Submit the same with some of the experts together, and the others not at all."""
        self._before_experts(emit, it, layer)
        self.some_experts(emit, it, layer)
        emit.combine(it, layer)

    def _before_experts(self, emit: Emitter, it: InFlight, layer: int) -> None:
        part = partial(self.stream.part, layer)
        emit.attention_in(it, layer, part("attention_in"))
        emit.prefill_attention(it, layer)
        emit.attention_out(it, layer, part("attention_out"))
        self.predict(emit, it, layer, part("attention_out"))

    def some_experts(self, emit: Emitter, it: InFlight, layer: int) -> None:
        """Submit some of the experts of a layer, whose weights the stream holds, in one op: few, a part and most. No
        two ops have an expert in common."""
        experts, begin = list(self.stream.experts(layer).items()), 0
        for number in sorted({2, len(experts) // 4, len(experts) * 3 // 4}):
            group = dict(experts[begin : begin + number])
            if 1 < len(group) < len(experts):
                emit.experts(it, layer, group)
                begin += len(group)

    def fits_staging(self, it: InFlight) -> bool:
        nbytes = it.batch.on_host.num_context_tokens * self.engine.spec.kv_bytes_per_token_layer
        return bool(it.batch.decode) and nbytes <= self.staging.nbytes

    def _stored_expert(self) -> PlacedPart:
        """Return one stored expert after another, so that their weights come from memory and not from a cache."""
        experts = self.engine.store.experts(self.engine.spec.moe_layers[-1])
        self._next_expert += 1
        return experts[self._next_expert % len(experts)]

    def close(self) -> None:
        self.stream.close()
        for acts in self.acts:
            acts.close()
        tiers = self.engine.machine.tiers
        tiers["device"].release(self.staging)
        self.kv.close()
        tiers["pinned"].release(self.kept)
        tiers["pinned"].release(self.sums)
        if self.staged is not None:
            tiers["host"].release(self.staged[0].buffer)
            tiers["pinned"].release(self.staged[1])


def _index_beside(spec: ModelSpec, index: int) -> int:
    """Return the next index whose layer has experts and lies in the other of a stream's two slots. Where that slot only
    ever holds dense layers, return the next index."""
    behind = range(index + 1, index + 2 * spec.num_layers, 2)
    return next((other for other in behind if not spec.is_dense(other % spec.num_layers)), index + 1)
