"""Tell how long a graph of ops takes, and which ops decide that: its critical path (MoE-Gen, Eq. 4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from harness.machine.recording import OpGraph
from kernels.simulation import in_lane_order as native_order


@dataclass(frozen=True, kw_only=True)
class CriticalPath:
    """The longest path through a graph: its length, its nodes in their order, and when each node of the graph ends."""

    seconds: float
    nodes: list[int]
    ends_s: list[float]


def critical_path(before: Sequence[Sequence[int]], seconds: Sequence[float]) -> CriticalPath:
    """Return the critical path of nodes that take `seconds` each. `before` has by node the smaller numbers of those
    that precede it. The time is linear in nodes and edges; of equal predecessors the first counts."""
    ends_s: list[float] = []
    through: list[int] = []  # by node, its predecessor on the longest path to it
    for own_s, earlier in zip(seconds, before, strict=True):
        latest, begin_s = -1, 0.0
        for node in earlier:
            if ends_s[node] > begin_s or latest < 0:
                latest, begin_s = node, ends_s[node]
        ends_s.append(begin_s + own_s)  # Eq. 4
        through.append(latest)
    node = max(range(len(ends_s)), key=ends_s.__getitem__, default=-1)
    length_s, nodes = ends_s[node] if ends_s else 0.0, []
    while node >= 0:
        nodes.append(node)
        node = through[node]
    return CriticalPath(seconds=length_s, nodes=nodes[::-1], ends_s=ends_s)


@dataclass(frozen=True, kw_only=True)
class InOrder:
    """A graph in which each lane does one thing at a time. Its nodes are runs of packets: an op that an urgent one
    interrupts has several. `nodes` has by run the node of the op, `last` by node its last run."""

    nodes: list[int]
    seconds: list[float]
    before: list[tuple[int, ...]]
    last: list[int]


def in_lane_order(graph: OpGraph, seconds: Sequence[float]) -> InOrder:
    """Put the ops of both classes of each lane in one order: that in which lanes run them where ops take `seconds`.

    As on every machine, the head of the normal class blocks its class until it is ready, and a ready urgent head goes
    first, between two packets too. The critical path of the result is as long as such a run takes.
    """
    numbers: dict[tuple[str, int], int] = {}
    packets = [1 if op is None else op.packets for op in graph.ops]
    nodes, runs_s, before, last = native_order(
        lane=[
            None if lane is None else numbers.setdefault((lane.kind, lane.rank), len(numbers)) for lane in graph.lanes
        ],
        urgent=graph.urgent,
        packets=packets,
        packet_s=[own_s / count for own_s, count in zip(seconds, packets, strict=True)],
        before=graph.before,
    )
    assert all(run >= 0 for run in last), "an op waits for one that its lane runs later"
    return InOrder(nodes=nodes, seconds=runs_s, before=before, last=last)
