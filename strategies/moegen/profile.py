"""Profile a layer's modules on the machine: what each op takes over batch sizes and lengths (MoE-Gen, Appendix B).

Every machine is profiled alike, by ops of one layer in buffers that are given back. What depends on rows alone is timed
over their number; attention is timed over the number of sequences and over lengths too: prompts of half the workload's
mean, of its mean and of its longest, and contexts as generation begins, halfway and as it ends. What there is no room
for, lengths or numbers, is extrapolated. Ops on the way to the device are timed alone, all others while weights are on
their way, as in the run. `costs` interpolates between the points; `module_memory` notes what ops take at their peak.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil
from statistics import median
from typing import Any

import numpy as np

from harness.bench.op_bench import OpBench
from harness.bench.shapes import Shape
from harness.engine.accumulated import AccumulatedBatch, AccumulatedMemory
from harness.engine.activations import Activations, device_bytes_per_token, host_bytes_per_token
from harness.engine.emitter import Emitter, InFlight
from harness.engine.engine import Engine
from harness.engine.limits import SLACK_BYTES
from harness.engine.ops.experts import Expert
from harness.machine.base import GPU, H2D, Lane, LaneKind, Op, Ticket
from harness.memory.expert_slots import expert_slot_bytes
from harness.memory.placed import PlacedPart
from harness.memory.tiers import DEVICE, PINNED, Buffer
from harness.memory.transfers import CopyWeights
from harness.memory.weights import WeightStream, slot_sizes
from strategies.common.workload_shape import WorkloadShape
from strategies.moegen.costs import ModuleCosts
from strategies.moegen.module_memory import ModuleMemory

_MOST_TOKENS = 4096  # of a probed micro-batch: these saturate a GPU, and beyond them time grows in proportion
_STEP = 4  # between two sizes that are measured
_SHARE = 0.8  # of the free memory that the profiler takes at most
_REPEATS = 3
_MOST_COPIES = 256  # of an expert, which keep the link busy
_STAGED = 8  # tokens of staged keys and values for each of a micro-batch's, so that long contexts are more than a few

Modules = Callable[[Emitter, InFlight], None]


@dataclass(frozen=True, kw_only=True)
class Profile:
    """The costs of ops, which were timed, with the points at which they were, and the device memory of each kind of op.

    `device_bytes_per_token` is what was reserved for all modules together for a token of a micro-batch, by the
    accounts of the machine's memory.
    """

    costs: ModuleCosts
    memory: ModuleMemory
    device_bytes_per_token: float
    points: tuple[str, ...]

    def as_record(self) -> dict[str, Any]:
        return {
            "points": self.points,
            "device_bytes_per_token": self.device_bytes_per_token,
            "memory": self.memory.as_record(),
            "estimated_ops": sorted(self.costs.estimated),
        }


class _Noting(Emitter):
    """Submits one op after another, and keeps their tickets. With `told` it waits for each, and tells of it."""

    def __init__(self, engine: Engine, told: Callable[[Ticket], None] | None = None) -> None:
        super().__init__(engine, serial=True)
        self.tickets: list[Ticket] = []
        self._told = told

    def submit(self, lane: Lane, op: Op, *, urgent: bool = False) -> Ticket:
        ticket = super().submit(lane, op, urgent=urgent)
        self.tickets.append(ticket)
        if self._told is not None:
            self._engine.machine.wait(ticket)
            self._told(ticket)
        return ticket


class ModuleProfiler:
    """The profiler runs the ops of one layer over micro-batches of either phase, in buffers of its own."""

    def __init__(self, engine: Engine, shape: WorkloadShape, *, max_tokens: int, packet_bytes: int) -> None:
        self._engine, self._shape, self._packet_bytes = engine, shape, packet_bytes
        machine, spec = engine.machine, engine.spec
        self._layer = spec.moe_layers[-1]
        self._stored = list(engine.store.experts(self._layer).values())
        self._buffers: list[Buffer] = []
        self._dense = WeightStream(
            machine, engine.store, depth=1, packet_bytes=packet_bytes, name="profiler dense", experts=False
        )
        slot_bytes = expert_slot_bytes(engine.store)
        self._slot = self._reserve(DEVICE, "profiler expert", slot_bytes)
        left_bytes = machine.tiers[DEVICE].free_bytes - max_tokens * _device_token_bytes(engine)
        has_room = left_bytes > slot_bytes + SLACK_BYTES
        self._other_slot = self._reserve(DEVICE, "profiler transfers", slot_bytes) if has_room else None
        before_bytes = machine.tiers[DEVICE].used_bytes
        n = self._max_tokens = max_tokens
        self._acts = Activations(machine, spec, max_tokens=n, name="profiler")
        self._memory = AccumulatedMemory.reserve(machine, spec, max_tokens=n, slice_tokens=n, num_stagings=1)
        staging = self._memory.stagings[0]
        self._buffers += [self._memory.rows, self._memory.sums]
        self._buffers += [staging.pinned_rows, staging.rows, staging.results, staging.pinned_results]
        self._kept = self._reserve(PINNED, "profiler hidden", n * spec.hidden_dim * spec.dtype_bytes)
        self._token_bytes = (machine.tiers[DEVICE].used_bytes - before_bytes) / n + spec.kv_bytes_per_token_layer
        self._kv_tokens = self._room_for_contexts()
        kv_bytes = self._kv_tokens * spec.kv_bytes_per_token_layer
        self._kv = self._reserve(DEVICE, "profiler keys and values", kv_bytes)
        self._bench = OpBench(engine, self._dense, [self._acts])
        self._costs, self._peaks, self._copy_s = ModuleCosts(), ModuleMemory(machine, spec), 0.0

    def measure(self) -> Profile:
        """Return the profile. It takes some passes of one layer for each size, and of its attention for each length."""
        self._weights()
        points = []
        for name, shape, modules in self._points():
            with self._placed(shape) as it:
                self._point(it, modules)
            points.append(f"{name}: {shape}, of {max(shape.prompts or shape.contexts)} tokens")
        return Profile(
            costs=self._costs, memory=self._peaks, device_bytes_per_token=self._token_bytes, points=tuple(points)
        )

    def _points(self) -> Iterator[tuple[str, Shape, Modules]]:
        """Yield what is timed over which micro-batch. Lengths have room for two sequences at the least."""
        shape, blocks, most = self._shape, self._engine.kv.allocator, self._max_tokens
        mean, new = ceil(shape.prompt_tokens), ceil(shape.new_tokens)

        def lengths(wanted: tuple[int, ...], room: int) -> list[int]:
            return sorted({max(1, min(length, room // 2)) for length in wanted})

        def together(length: int, room: int) -> int:
            return max(1, min(room // length, blocks.num_free // blocks.blocks_for(length)))

        length = max(1, min(mean, most))
        for num_tokens in self._sizes(min(most, together(length, most) * length)):
            yield "modules", Shape.of_prompts(num_tokens, min(num_tokens, length)), self._modules
        for length in lengths((ceil(mean / 2), mean, shape.longest_prompt), most):
            for count in self._sizes(together(length, most)):
                yield "attention", Shape(prompts=(length,) * count), self._attention
        for num_rows in self._sizes(min(most, blocks.num_free)):
            yield "modules", Shape(contexts=(1,) * num_rows), self._modules
        for length in lengths((mean + 1, mean + new // 2, mean + new), self._kv_tokens):
            for count in self._sizes(min(most, together(length, self._kv_tokens))):
                yield "attention", Shape(contexts=(length,) * count), self._attention

    @contextmanager
    def _placed(self, shape: Shape) -> Iterator[InFlight]:
        """Give a micro-batch of that shape in the activation buffers; contexts lie in the engine's cache meanwhile."""
        if shape.contexts:
            with self._bench.cached(shape, self._layer) as it:
                yield it
        else:
            yield self._bench.place(self._bench.batch(shape, self._engine.kv.allocator))

    def _room_for_contexts(self) -> int:
        """Return for how many tokens of keys and values the profiler has room on the device and in the cache."""
        spec, blocks = self._engine.spec, self._engine.kv.allocator
        free_bytes = self._engine.machine.tiers[DEVICE].free_bytes - SLACK_BYTES
        wanted = max(_STAGED * self._max_tokens, 2 * self._shape.longest_kv_tokens)
        fitting = max(self._max_tokens, int(_SHARE * free_bytes) // spec.kv_bytes_per_token_layer)
        return min(wanted, fitting, blocks.num_free * blocks.block_size)

    def close(self) -> None:
        """Give all buffers back."""
        self._engine.machine.drain()
        self._dense.close()
        self._acts.close()
        for buffer in self._buffers:
            self._engine.machine.tiers[buffer.tier].release(buffer)

    def _reserve(self, tier: str, name: str, nbytes: int) -> Buffer:
        self._buffers.append(self._engine.machine.tiers[tier].reserve(name, nbytes))
        return self._buffers[-1]

    def _sizes(self, most: int) -> Iterator[int]:
        """Yield sizes to measure, the largest first: on a real machine memory is then touched before it is timed."""
        size = most
        while size > 1:
            yield size
            size = size // _STEP
        yield 1

    def _weights(self) -> None:
        """Time the transfers of a layer's parts and of an expert, and leave them on the device."""
        machine = self._engine.machine
        for repeat in range(_REPEATS):
            tickets = [*self._dense.request_layer(self._layer), *self._copies(self._slot, 1)]
            for ticket in tickets:
                machine.wait(ticket)
            machine.now()
            for ticket in tickets:
                self._costs.add(ticket.lane, ticket.op, _seconds(ticket))
            self._copy_s = max(_seconds(tickets[-1]), 1e-9)
            if repeat < _REPEATS - 1:
                for name in self._dense.part_names(self._layer):
                    self._dense.release(self._layer, name)

    def _copies(self, slot: Buffer, count: int) -> list[Ticket]:
        machine, stored = self._engine.machine, self._stored
        copies = (
            CopyWeights(stored[i % len(stored)], slot, layer=self._layer, packet_bytes=self._packet_bytes)
            for i in range(count)
        )
        return [machine.submit(H2D, copy) for copy in copies]

    def _point(self, it: InFlight, modules: Modules) -> None:
        """Time modules over a micro-batch: alone for the link, and beside it for the other lanes."""
        self._bench.emit.upload_tokens(it)
        alone = self._repeated(it, modules, 0)
        all_s = sum(median(times) for _, times in alone)
        num_copies = min(_MOST_COPIES, ceil(1.5 * all_s / self._copy_s) + 1)
        beside = self._repeated(it, modules, num_copies) if self._other_slot is not None else alone
        for (ticket, alone_s), (_, beside_s) in zip(alone, beside, strict=True):
            times = alone_s if ticket.lane.kind is LaneKind.H2D else beside_s
            self._costs.add(ticket.lane, ticket.op, median(times))

    def _repeated(self, it: InFlight, modules: Modules, num_copies: int) -> list[tuple[Ticket, list[float]]]:
        """Return the modules' ops, each with its seconds. The first time, which warms up, tells their memory."""
        runs: list[list[Ticket]] = []
        for repeat in range(_REPEATS + 1):
            with self._busy_link(num_copies):
                emit = _Noting(self._engine, None if repeat or num_copies else self._note_memory(it))
                modules(emit, InFlight(it.batch, it.acts))
                for ticket in emit.tickets:
                    self._engine.machine.wait(ticket)
            self._engine.machine.now()
            runs.append(emit.tickets)
        return [(each[0], [_seconds(ticket) for ticket in each]) for each in zip(*runs[1:], strict=True)]

    def _note_memory(self, it: InFlight) -> Callable[[Ticket], None]:
        return lambda ticket: self._peaks.note(ticket.lane, ticket.op, it.batch.num_tokens)

    @contextmanager
    def _busy_link(self, num_copies: int) -> Iterator[None]:
        tickets = self._copies(self._other_slot, num_copies) if self._other_slot is not None else []
        yield
        for ticket in tickets:
            self._engine.machine.wait(ticket)

    def _attention(self, emit: Emitter, it: InFlight) -> None:
        """Submit attention in all the ways that a policy can take: the ops whose time depends on lengths."""
        layer, rows = self._layer, range(it.batch.num_tokens)
        if it.batch.prefill:
            emit.prefill_attention(it, layer)
            return
        emit.attend_on_host(it, layer)
        emit.load_kv(it, layer, rows, self._kv)
        emit.attend_on_device(it, layer, rows, self._kv)

    def _modules(self, emit: Emitter, it: InFlight) -> None:
        """Submit a layer's modules but attention, with all the ways that a policy can take through experts."""
        layer, spec, n, decodes = self._layer, self._engine.spec, it.batch.num_tokens, not it.batch.prefill
        tokens, weights = np.arange(n), np.full(n, 1 / spec.experts_per_token, dtype=np.float32)
        expert = PlacedPart(self._stored[0].layout, self._slot, (self._slot,))
        accumulated = AccumulatedBatch(self._engine, emit, self._memory)
        emit.embed(it)
        emit.attention_in(it, layer, self._dense.part(layer, "attention_in"))
        emit.offload_qkv(it, layer, queries=decodes)
        emit.append_kv(it, layer)
        if decodes:
            emit.load_attention(it, layer)
        emit.attention_out(it, layer, self._dense.part(layer, "attention_out"))
        emit.route(it, layer)
        acts = it.acts
        emit.submit(
            GPU,
            Expert(
                self._engine.family, spec, expert, acts.normed, acts.moe_out, n,
                layer=layer, tokens=tokens, weights=weights,
            ),
        )  # fmt: skip
        accumulated.begin(layer)
        rows, _ = accumulated.add(it)
        accumulated.begin_experts()
        accumulated.expert(expert, tokens, weights)
        emit.offload_hidden(it, layer, self._kept)
        emit.load_hidden(it, layer, self._kept)
        it.owes_sums = False
        accumulated.take_sums(it, rows)
        emit.combine(it, layer)
        emit.head(it)


def _seconds(ticket: Ticket) -> float:
    return (ticket.finished_s or 0.0) - (ticket.started_s or 0.0)


def _device_token_bytes(engine: Engine) -> int:
    spec = engine.spec
    rows = spec.hidden_dim * (spec.dtype_bytes + 4)
    return device_bytes_per_token(spec, engine.machine.gpu_kernels) + rows + spec.kv_bytes_per_token_layer


def most_tokens(engine: Engine) -> int:
    """Return the tokens of the largest micro-batch for whose profile there is room; 0 where there is none."""
    spec, tiers, blocks, store = engine.spec, engine.machine.tiers, engine.kv.allocator, engine.store
    dense = slot_sizes([part.layout for part in store.dense(layer).values()] for layer in range(len(store.layers)))
    left_bytes = tiers[DEVICE].free_bytes - sum(dense.values()) - expert_slot_bytes(store) - SLACK_BYTES
    pinned_bytes = host_bytes_per_token(spec) + spec.hidden_dim * (3 * spec.dtype_bytes + 2 * 4)
    fitting = min(
        _SHARE * left_bytes // _device_token_bytes(engine),
        _SHARE * (tiers[PINNED].free_bytes - SLACK_BYTES) // pinned_bytes,
        blocks.num_free * blocks.block_size,
    )
    return max(0, min(_MOST_TOKENS, int(fitting)))


def measured(engine: Engine, shape: WorkloadShape, *, packet_bytes: int) -> Profile | None:
    """Return a profile of the modules on the machine; None where there is nothing to profile for, or no room."""
    if not shape.num_requests or not engine.spec.moe_layers or not (max_tokens := most_tokens(engine)):
        return None
    profiler = ModuleProfiler(engine, shape, max_tokens=max_tokens, packet_bytes=packet_bytes)
    try:
        return profiler.measure()
    finally:
        profiler.close()
