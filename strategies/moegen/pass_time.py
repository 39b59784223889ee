"""Tell how long a recorded pass takes: the T of Eq. 1.

The time of a layer is the end of one between the first and the last on the critical path minus the end of the one
before it, or what the busiest lane needs for a layer where that is more: experts that the link has brought ahead while
the pipeline filled do not last for long. The time of a pass is the sum over all layers, with embedding and head.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from harness.engine.ops.compute import Combine, Embed
from harness.engine.ops.data import FetchSampled
from harness.machine.base import Lane, LaneKind, Op
from harness.machine.critical_path import critical_path, in_lane_order
from harness.machine.recording import OpGraph
from harness.memory.transfers import CopyWeights
from harness.model.spec import ModelSpec
from strategies.moegen.recorded import Recorded, steady_layers

Cost = Callable[[Lane, Op], float]  # seconds
DecidedBy = Literal["path", "lane"]


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


def pass_time(recorded: Recorded, cost: Cost, spec: ModelSpec) -> PassTime:
    """Return the time of a pass over all layers of the model with dimensions `spec`, from a pass over its first
    layers."""
    graph, few = recorded.graph, recorded.spec
    seconds = [
        cost(lane, op) if op is not None and lane is not None else 0.0
        for op, lane in zip(graph.ops, graph.lanes, strict=True)
    ]
    runs = in_lane_order(graph, seconds)
    path = critical_path(runs.before, runs.seconds)
    ends_s = [path.ends_s[run] for run in runs.last]
    layer_ends_s = _layer_ends(graph, ends_s, few.num_layers)
    embed_s = sum(own_s for own_s, op in zip(seconds, graph.ops, strict=True) if type(op) is Embed)
    begins_s = [embed_s, *layer_ends_s]
    layers_s = [end_s - begin_s for begin_s, end_s in zip(begins_s, layer_ends_s, strict=False)]
    steady = steady_layers(few)
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


def _layer_ends(graph: OpGraph, ends_s: list[float], num_layers: int) -> list[float]:
    """Return when the GPU ends each layer: its last op but the one that waits for the next layer's turn."""
    found = [0.0] * num_layers
    for op, lane, end_s in zip(graph.ops, graph.lanes, ends_s, strict=True):
        if op is None or lane is None or lane.kind is not LaneKind.GPU:
            continue
        if op.layer is not None and type(op) is not Combine:
            found[op.layer] = max(found[op.layer], end_s)
    return found
