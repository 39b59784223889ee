"""Find how long a pass takes under a policy: the T of Eq. 1, from the ops that the pipeline submits.

The pipeline itself runs on a recording machine, over a model of few layers. The first layer fills the pipeline, and
the last one lets it run empty: nobody loads keys and values for a layer behind it. The time of a layer is the end of
one between them on the critical path minus the end of the one before it, or what the busiest lane needs for a layer
where that is more: experts that the link has brought ahead while the pipeline filled do not last for long. The time of
a pass is the sum over all layers, with embedding and head.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil
from typing import Any, Literal

import numpy as np

from harness.engine.batch import PassPlan
from harness.engine.engine import Engine
from harness.engine.kv_placement import make_kv
from harness.engine.ops.compute import Combine, Embed
from harness.engine.ops.data import FetchSampled
from harness.engine.sequences import Sequence, State
from harness.engine.strategy import Pipeline
from harness.machine.base import Lane, LaneKind, Op
from harness.machine.critical_path import critical_path, in_lane_order
from harness.machine.recording import OpGraph, RecordingMachine
from harness.machine.virtual.world import World
from harness.memory.kv_cache import BlockAllocator
from harness.memory.tiers import PINNED
from harness.memory.transfers import CopyWeights
from harness.memory.weights import Resident, WeightStore
from harness.model.planned import PlannedModel
from harness.model.spec import ModelSpec
from harness.workload.request import Request
from strategies.common.workload_shape import WorkloadShape
from strategies.moegen.pipeline import ModuleBatching
from strategies.moegen.policy import Policy

Cost = Callable[[Lane, Op], float]  # seconds
Build = Callable[[Engine, Policy, WorkloadShape], Pipeline]
DecidedBy = Literal["path", "lane"]
_SAMPLES = 4  # of each expert, at the least, in the layers whose time counts
_FEW_EXPERTS = 8  # in a layer: a part of one still matters
_ROOM_BYTES = 1 << 60  # of each tier: what a policy holds is counted elsewhere


@dataclass(frozen=True, kw_only=True)
class Batch:
    """A batch is the sequences of a pass: prompts of `tokens` each, or decoding sequences with contexts of so many."""

    num_sequences: int
    tokens: int
    decodes: bool

    def num_blocks(self, block_size: int) -> int:
        """Return the blocks of keys and values that all of them take."""
        return self.num_sequences * -(-(self.tokens + 1) // block_size)


@dataclass(frozen=True, kw_only=True)
class PassTime:
    """The time of a pass of all layers, and of its parts.

    A layer with experts takes what its critical path does or, where that is more, the sum of the ops of its busiest
    lane: `decided_by` says which. `bound` has the seconds of that path or lane, by lane and kind of op; `busy` those of
    each lane in all layers.
    """

    seconds: float
    moe_layer_s: float
    dense_layer_s: float
    ends_s: float  # of embedding and head
    decided_by: DecidedBy
    bound: Mapping[str, float]
    busy: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """The ops of one pass, with those that the engine and the pipeline submit before it."""

    graph: OpGraph
    first: int  # node of the pass
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


def first_layers(spec: ModelSpec, count: int) -> ModelSpec:
    return replace(spec, num_layers=count, dense_layers=tuple(layer for layer in spec.dense_layers if layer < count))


def record(
    engine: Engine, spec: ModelSpec, policy: Policy, shape: WorkloadShape, batch: Batch, build: Build
) -> Recorded:
    """Record a pass of `batch` in a model of the engine's family with the dimensions of `spec`."""
    machine = RecordingMachine(capacities_bytes=dict.fromkeys(engine.machine.tiers, _ROOM_BYTES))
    machine.world = World(HashedRouting(spec), spec.num_experts)
    block_size = engine.kv.allocator.block_size
    num_blocks = batch.num_blocks(block_size)
    store = _store(spec, engine.family)
    kv = make_kv(machine, [spec], block_size=block_size, host_bytes=num_blocks * block_size * spec.kv_bytes_per_token)
    model = Engine(
        machine=machine, spec=spec, family=engine.family, store=store, resident=Resident(machine, store), kv=kv[0]
    )
    pipeline = build(model, policy, shape)
    plan = _plan(model, policy, batch)
    machine.drain()
    first = machine.num_nodes
    pipeline.run(plan).complete()
    graph = machine.graph()
    machine.forget()
    return Recorded(graph=graph, first=first, spec=spec)


@lru_cache(maxsize=4)
def _store(spec: ModelSpec, family: Any) -> WeightStore:
    """Return a model in host memory of its own, where it has been read: recorded passes change nothing there."""
    return WeightStore(RecordingMachine(capacities_bytes={PINNED: _ROOM_BYTES}), PlannedModel(spec, family))


@lru_cache(maxsize=8)
def _sequences(batch: Batch, block_size: int) -> list[Sequence]:
    """Return the sequences of a batch, each with blocks of its own; recording a pass changes no more than their
    partitions."""
    blocks = BlockAllocator(batch.num_blocks(block_size), block_size)
    prompt = (0,) * batch.tokens
    sequences = []
    for number in range(batch.num_sequences):
        request = Request(request_id=number, prompt_ids=prompt, max_new_tokens=2, text=None)
        sequence = Sequence(request, state=State.DECODING if batch.decodes else State.PREFILL)
        blocks.grow(sequence, batch.tokens + batch.decodes)
        if batch.decodes:
            sequence.generated, sequence.num_cached = [0], batch.tokens
        sequences.append(sequence)
    return sequences


def _plan(engine: Engine, policy: Policy, batch: Batch) -> PassPlan:
    """Return the pass as the scheduler would make it, with a KV partition for each micro-batch."""
    sequences = _sequences(batch, engine.kv.allocator.block_size)
    phase = policy.decode if batch.decodes else policy.prefill
    num_cpu, size = phase.num_on_cpu(len(sequences)) if batch.decodes else 0, phase.attention_batch
    groups = [
        part[first : first + size]
        for part in (sequences[:num_cpu], sequences[num_cpu:])
        for first in range(0, len(part), size)
    ]
    for number, group in enumerate(groups):
        for sequence in group:
            sequence.partition = number
    prefill, decode = ([], sequences) if batch.decodes else (sequences, [])
    return PassPlan(prefill, decode, "recorded", micro_batches=groups)


def pass_time(recorded: Recorded, cost: Cost, spec: ModelSpec) -> PassTime:
    """Return the time of a pass over all layers of the model with dimensions `spec`, from a pass over its first
    layers."""
    graph, few = recorded.graph, recorded.spec
    seconds = _seconds(recorded, cost)
    runs = in_lane_order(graph, seconds)
    path = critical_path(runs.before, runs.seconds)
    ends_s = [path.ends_s[run] for run in runs.last]
    layer_ends_s = _layer_ends(graph, recorded.first, ends_s, few.num_layers)
    embed_s = sum(own_s for own_s, op in zip(seconds, graph.ops, strict=True) if type(op) is Embed)
    begins_s = [embed_s, *layer_ends_s]
    layers_s = [end_s - begin_s for begin_s, end_s in zip(begins_s, layer_ends_s, strict=False)]
    steady = few.moe_layers[1:-1] or few.moe_layers[-1:]
    begin_s, end_s = layer_ends_s[steady[0] - 1] if steady[0] else 0.0, layer_ends_s[steady[-1]]
    on_path: dict[str, float] = defaultdict(float)
    for run in path.nodes:
        op, lane = graph.ops[runs.nodes[run]], graph.lanes[runs.nodes[run]]
        if op is not None and begin_s < path.ends_s[run] <= end_s:
            on_path[f"{lane} {op.kind}"] += runs.seconds[run] / len(steady)
    on_lanes = _on_lanes(graph, seconds, steady)
    busiest = max(on_lanes.values(), key=lambda kinds: sum(kinds.values()))
    moe_layer_s, bound = sum(layers_s[layer] for layer in steady) / len(steady), on_path
    decided_by: DecidedBy = "path"
    if sum(busiest.values()) > moe_layer_s:
        moe_layer_s, bound, decided_by = sum(busiest.values()), busiest, "lane"
    dense_layer_s = layers_s[few.dense_layers[-1]] if few.dense_layers else 0.0
    on_lanes_dense = _on_lanes(graph, seconds, few.dense_layers[-1:])
    sampled_s = max(end_s for end_s, op in zip(ends_s, graph.ops, strict=True) if type(op) is FetchSampled)
    ends_only_s = embed_s + sampled_s - layer_ends_s[-1]
    layers_all_s = spec.num_moe_layers * moe_layer_s + len(spec.dense_layers) * dense_layer_s
    return PassTime(
        seconds=layers_all_s + ends_only_s,
        moe_layer_s=moe_layer_s,
        dense_layer_s=dense_layer_s,
        ends_s=ends_only_s,
        decided_by=decided_by,
        bound=dict(sorted(bound.items(), key=lambda item: -item[1])),
        busy={
            lane: spec.num_moe_layers * sum(kinds.values())
            + len(spec.dense_layers) * sum(on_lanes_dense.get(lane, {}).values())
            for lane, kinds in on_lanes.items()
        },
    )


def _on_lanes(graph: OpGraph, seconds: list[float], layers: tuple[int, ...]) -> dict[str, dict[str, float]]:
    """Return what one of these layers' ops take, by lane, and by lane and kind of op. Weights that come again, for the
    next pass, do not count twice."""
    sums: dict[tuple[str, int, str], float] = defaultdict(float)  # by lane and kind of op
    brought = set()
    for op, lane, own_s in zip(graph.ops, graph.lanes, seconds, strict=True):
        if op is None or lane is None or op.layer not in layers or not own_s or op.reads in brought:
            continue
        if type(op) is CopyWeights:
            brought.add(op.reads)
        sums[lane.kind, lane.rank, op.kind] += own_s / len(layers)
    found: dict[str, dict[str, float]] = defaultdict(dict)
    for (kind, rank, op_kind), its_s in sums.items():
        name = str(Lane(LaneKind(kind), rank))
        found[name][f"{name} {op_kind}"] = its_s
    return found


def _seconds(recorded: Recorded, cost: Cost) -> list[float]:
    """Return what each node costs; what came before the pass costs nothing."""
    found = [0.0] * recorded.first
    for op, lane in zip(recorded.graph.ops[recorded.first :], recorded.graph.lanes[recorded.first :], strict=True):
        found.append(cost(lane, op) if op is not None and lane is not None else 0.0)
    return found


def _layer_ends(graph: OpGraph, first: int, ends_s: list[float], num_layers: int) -> list[float]:
    """Return when the GPU ends each layer: its last op but the one that waits for the next layer's turn."""
    found = [0.0] * num_layers
    for node in range(first, len(graph)):
        op, lane = graph.ops[node], graph.lanes[node]
        if op is None or lane is None or lane.kind is not LaneKind.GPU:
            continue
        if op.layer is not None and type(op) is not Combine:
            found[op.layer] = max(found[op.layer], ends_s[node])
    return found


@dataclass(eq=False, kw_only=True)
class PassTimes:
    """Tells the time of passes under any policy, and remembers what it has been asked."""

    engine: Engine
    shape: WorkloadShape
    cost: Cost
    packet_bytes: int
    build: Build | None = None
    num_recorded: int = 0

    def __post_init__(self) -> None:
        self._known: dict[object, PassTime] = {}

    def of(self, policy: Policy, batch: Batch) -> PassTime:
        """Return the time of a pass. Of the experts that stay on the device each layer has as many; between two small
        whole numbers it is a straight line."""
        spec, num_tokens = self.engine.spec, batch.num_sequences * (1 if batch.decodes else batch.tokens)
        few = few_layers(spec, policy.dense_slots, num_tokens)
        resident = policy.resident_experts / spec.num_moe_layers  # in each layer
        low = int(resident) if resident < _FEW_EXPERTS else round(resident)
        resident = resident if resident < _FEW_EXPERTS else low
        found = self._at(policy, batch, few, low)
        return found if resident == low else _between(found, self._at(policy, batch, few, low + 1), resident - low)

    def _at(self, policy: Policy, batch: Batch, few: ModelSpec, resident: int) -> PassTime:
        all_dense = policy.dense_slots >= self.engine.spec.num_layers
        dense_slots = few.num_layers if all_dense else policy.dense_slots
        policy = replace(policy, resident_experts=resident * few.num_moe_layers, dense_slots=dense_slots)
        phase = policy.decode if batch.decodes else policy.prefill
        key = (phase, batch, resident, policy.expert_slots, policy.dense_slots, policy.prefetch)
        if key not in self._known:
            self.num_recorded += 1
            recorded = record(self.engine, few, policy, self.shape, batch, self.build or self._pipeline)
            self._known[key] = pass_time(recorded, self.cost, self.engine.spec)
        return self._known[key]

    def _pipeline(self, engine: Engine, policy: Policy, shape: WorkloadShape) -> Pipeline:
        return ModuleBatching(engine, policy, shape, packet_bytes=self.packet_bytes)


def _between(low: PassTime, high: PassTime, share: float) -> PassTime:
    def at(first: float, second: float) -> float:
        return first + (second - first) * share

    return replace(
        low,
        seconds=at(low.seconds, high.seconds),
        moe_layer_s=at(low.moe_layer_s, high.moe_layer_s),
        dense_layer_s=at(low.dense_layer_s, high.dense_layer_s),
        ends_s=at(low.ends_s, high.ends_s),
        busy={lane: at(busy_s, high.busy.get(lane, 0.0)) for lane, busy_s in low.busy.items()},
    )
