"""Record the ops of a pass under a policy.

The pipeline itself runs on a recording machine, over a model of few layers. The first layer fills the pipeline, and
the last one lets it run empty: nobody loads keys and values for a layer behind it. What lies between them counts, so
the last layer's experts may be left out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil
from typing import Any

import numpy as np

from harness.engine.batch import PassPlan, assemble
from harness.engine.engine import Engine
from harness.engine.garbage import let_go
from harness.engine.kv_placement import make_kv
from harness.engine.sequences import Sequence, State
from harness.engine.strategy import Pipeline
from harness.machine.recording import OpGraph, RecordingMachine
from harness.machine.virtual.world import World
from harness.memory.kv_cache import BlockAllocator
from harness.memory.tiers import PINNED
from harness.memory.weights import Resident, WeightStore
from harness.model.planned import PlannedModel
from harness.model.spec import ModelSpec
from harness.workload.request import Request
from strategies.common.workload_shape import WorkloadShape
from strategies.moegen.policy import Policy

Build = Callable[[Engine, Policy, WorkloadShape], Pipeline]
_SAMPLES = 4  # of each expert, at the least, in the layers whose time counts
_ROOM_BYTES = 1 << 60  # of each tier: what a policy holds is counted elsewhere


@dataclass(frozen=True, kw_only=True)
class Batch:
    """A batch is the sequences of a pass: prompts of `tokens` each, or decoding sequences with contexts of so many."""

    num_sequences: int
    tokens: int
    decodes: bool

    @property
    def tokens_each(self) -> int:
        """The tokens of each sequence that go through the model."""
        return 1 if self.decodes else self.tokens

    def num_blocks(self, block_size: int) -> int:
        """Return the blocks of keys and values that all of them take."""
        return self.num_sequences * -(-(self.tokens + 1) // block_size)


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """The ops of one pass of a model with the dimensions `spec`."""

    graph: OpGraph
    spec: ModelSpec


class HashedRouting:
    """Chooses experts by a hash of request, position and layer, all of them equally often."""

    source = "synthetic: drawn by a hash"
    is_even = True
    predictions = None

    def __init__(self, spec: ModelSpec) -> None:
        self._num_experts, self._chosen = spec.num_experts, spec.experts_per_token
        steps = np.arange(1, max(self._num_experts, 2))
        self._steps = steps[np.gcd(steps, self._num_experts) == 1]  # steps that reach each expert once

    def num_shared(self, request_ids: np.ndarray, others: np.ndarray) -> int:
        """Return how many requests are among the others: each has a routing of its own."""
        return int(np.isin(request_ids, others).sum())

    def experts(self, request_ids: np.ndarray, positions: np.ndarray, layer: int) -> np.ndarray:
        """Return experts of each token, int64 [tokens, experts_per_token], no expert twice."""
        seeds = (request_ids.astype(np.uint64) << np.uint64(24)) + positions.astype(np.uint64) + np.uint64(layer << 50)
        mixed = seeds * np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed ^= mixed >> np.uint64(32)
        begins = (mixed % np.uint64(self._num_experts)).astype(np.int64)
        steps = self._steps[(mixed >> np.uint64(20)) % np.uint64(len(self._steps))]
        return (begins[:, None] + steps[:, None] * np.arange(self._chosen)) % self._num_experts


class _RoutedOnce(HashedRouting):
    """Chooses as `HashedRouting` does, for a batch whose tokens are all routed once, however often it is recorded.
    In layers that are not among `layers`, if any are given, no token chooses an expert."""

    def __init__(self, spec: ModelSpec, batch: Batch, *, layers: Collection[int] | None = None) -> None:
        super().__init__(spec)
        self._spec, self._batch, self._layers = spec, batch, spec.moe_layers if layers is None else layers

    def experts(self, request_ids: np.ndarray, positions: np.ndarray, layer: int) -> np.ndarray:
        if layer not in self._layers:
            return np.empty((len(positions), 0), dtype=np.int64)
        first = int(request_ids[0]) * self._batch.tokens_each  # rows follow one another
        return _routed(self._spec, self._batch, layer)[first : first + len(positions)].astype(np.int64)


def most_tokens_of_expert(spec: ModelSpec, batch: Batch, layers: Iterable[int]) -> int:
    """Return the most tokens that an expert has in any of these layers."""
    return max(int(np.bincount(_routed(spec, batch, layer).ravel()).max()) for layer in layers)


@lru_cache(maxsize=12)
def _routed(spec: ModelSpec, batch: Batch, layer: int) -> np.ndarray:
    """Return the experts of all tokens of a batch in a layer, sequence by sequence: uint16, for they are kept."""
    ids = np.repeat(np.arange(batch.num_sequences), batch.tokens_each)
    first = batch.tokens if batch.decodes else 0
    positions = first + np.tile(np.arange(batch.tokens_each), batch.num_sequences)
    return HashedRouting(spec).experts(ids, positions, layer).astype(np.uint16)


def few_layers(spec: ModelSpec, dense_slots: int, num_tokens: int) -> ModelSpec:
    """Return the model with only the first layers, among which three have experts.

    There are more where a layer has few tokens: those between the first and the last one choose as many experts as
    would be all of a layer's several times over. They are an even number where a window holds for every second layer.
    One layer has no experts, if any has none. There are more layers than have a slot, unless all have one.
    """
    chosen = num_tokens * spec.experts_per_token
    between = max(1, ceil(_SAMPLES * spec.num_experts / max(chosen, 1)))
    alternate = spec.sliding_window is not None and spec.sliding_layers == "even"
    num_moe = 2 + between + (alternate and between % 2)
    dense = set(spec.dense_layers)
    count = 0
    while count < spec.num_layers:
        count += 1
        has_dense = any(layer in dense for layer in range(count)) or not dense
        enough = sum(layer not in dense for layer in range(count)) >= num_moe
        if has_dense and enough and (count > dense_slots or dense_slots >= spec.num_layers):
            break
    return first_layers(spec, count)


def steady_layers(spec: ModelSpec) -> tuple[int, ...]:
    """Return the layers with experts whose time counts: those between the first and the last one, or that one alone."""
    return spec.moe_layers[1:-1] or spec.moe_layers[-1:]


def first_layers(spec: ModelSpec, count: int) -> ModelSpec:
    return replace(spec, num_layers=count, dense_layers=tuple(layer for layer in spec.dense_layers if layer < count))


def record(
    engine: Engine, spec: ModelSpec, policy: Policy, shape: WorkloadShape, batch: Batch, build: Build, *,
    experts_in: Collection[int] | None = None,
) -> Recorded:  # fmt: skip
    """Record a pass of `batch` in a model of the engine's family with the dimensions of `spec`. Experts run in the
    layers `experts_in`; None: in all that have any."""
    machine = RecordingMachine(capacities_bytes=dict.fromkeys(engine.machine.tiers, _ROOM_BYTES), records=False)
    machine.world = World(_RoutedOnce(spec, batch, layers=experts_in), spec.num_experts)
    block_size = engine.kv.allocator.block_size
    num_blocks = batch.num_blocks(block_size)
    store = _store(spec, engine.family)
    kv = make_kv(machine, [spec], block_size=block_size, host_bytes=num_blocks * block_size * spec.kv_bytes_per_token)
    model = Engine(
        machine=machine, spec=spec, family=engine.family, store=store, resident=Resident(machine, store), kv=kv[0]
    )
    pipeline = build(model, policy, shape)
    phase = policy.decode if batch.decodes else policy.prefill
    plan = _plan(
        batch, phase.attention_batch, phase.num_on_cpu(batch.num_sequences) if batch.decodes else 0, block_size
    )
    machine.records = True  # from here on: the pass alone
    pipeline.run(plan).complete()
    graph = machine.graph()
    machine.forget()
    let_go(pipeline, model, machine, *machine.tiers.values())
    return Recorded(graph=graph, spec=spec)


@lru_cache(maxsize=4)
def _store(spec: ModelSpec, family: Any) -> WeightStore:
    """Return a model in host memory of its own, where it has been read: recorded passes change nothing there."""
    return WeightStore(
        RecordingMachine(capacities_bytes={PINNED: _ROOM_BYTES}, records=False), PlannedModel(spec, family)
    )


@lru_cache(maxsize=4)
def _sequences(batch: Batch, block_size: int) -> tuple[Sequence, ...]:
    """Return the sequences of a batch, each with blocks of its own. Recording a pass changes nothing of them, and plans
    of the batch share them: `partition` is that of the plan which was made last."""
    prompt, num_blocks = (0,) * batch.tokens, -(-(batch.tokens + batch.decodes) // block_size)
    sequences = []
    for number in range(batch.num_sequences):
        request = Request(request_id=number, prompt_ids=prompt, max_new_tokens=2, text=None)
        sequence = Sequence(request, state=State.DECODING if batch.decodes else State.PREFILL)
        sequence.blocks = list(range(number * num_blocks, (number + 1) * num_blocks))
        if batch.decodes:
            sequence.generated, sequence.num_cached = [0], batch.tokens
        sequences.append(sequence)
    return tuple(sequences)


@lru_cache(maxsize=16)
def _plan(batch: Batch, attention_batch: int, num_cpu: int, block_size: int) -> PassPlan:
    """Return the pass as the scheduler would make it, with a KV partition for each micro-batch, laid out."""
    sequences = _sequences(batch, block_size)
    groups = [
        list(part[first : first + attention_batch])
        for part in (sequences[:num_cpu], sequences[num_cpu:])
        for first in range(0, len(part), attention_batch)
    ]
    for number, group in enumerate(groups):  # what is laid out below takes note of it
        for sequence in group:
            sequence.partition = number
    prefill, decode = ([], list(sequences)) if batch.decodes else (list(sequences), [])
    blocks = BlockAllocator(0, block_size)  # tells the size
    assembled = [
        assemble(number, [] if batch.decodes else group, group if batch.decodes else [], blocks)
        for number, group in enumerate(groups)
    ]
    return PassPlan(prefill, decode, "recorded", micro_batches=groups, assembled=assembled)
