"""Play a graph of ops on lanes in plain Python: the oracle of the order that C++ finds."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush
from math import ceil

from harness.machine.base import Lane
from harness.machine.critical_path import InOrder
from harness.machine.recording import OpGraph


def played(graph: OpGraph, seconds: Sequence[float]) -> InOrder:
    """Return the runs of the graph's ops as `in_lane_order` does."""
    return _Ordering(graph, seconds).run()


class _LaneState:
    """A lane on its way: what waits in its two classes, and the packets that it runs without a break."""

    __slots__ = ("latest", "left", "normal", "num_packets", "packet_s", "running", "start_s", "urgent", "version")

    def __init__(self) -> None:
        self.normal: deque[int] = deque()
        self.urgent: deque[int] = deque()
        self.left: dict[int, int] = {}  # packets of an op that was interrupted
        self.running: int | None = None
        self.start_s = self.packet_s = 0.0
        self.num_packets = 0  # until its end, or until an urgent op's turn
        self.version = 0  # of that number
        self.latest: int | None = None  # the run that ended last

    @property
    def end_s(self) -> float:
        return self.start_s + self.num_packets * self.packet_s


class _Ordering:
    """Plays the graph on lanes: whatever ends at one time ends, and the strategy's thread goes on, before any op
    begins."""

    def __init__(self, graph: OpGraph, seconds: Sequence[float]) -> None:
        self._graph = graph
        self._packets = [1 if op is None else op.packets for op in graph.ops]
        self._packet_s = [own_s / packets for own_s, packets in zip(seconds, self._packets, strict=True)]
        self._unmet = [len(earlier) for earlier in graph.before]
        self._after: list[list[int]] = [[] for _ in graph.before]
        for node, earlier in enumerate(graph.before):
            for other in earlier:
                self._after[other].append(node)
        self._lanes: dict[Lane, _LaneState] = {}
        for node, (lane, urgent) in enumerate(zip(graph.lanes, graph.urgent, strict=True)):
            if lane is not None:
                state = self._lanes.setdefault(lane, _LaneState())
                (state.urgent if urgent else state.normal).append(node)
        self._events: list[tuple[float, int, int, _LaneState]] = []  # (end, node, version, lane)
        self._runs = InOrder(nodes=[], seconds=[], before=[], last=[-1] * len(graph))

    def run(self) -> InOrder:
        self._go_on([node for node, unmet in enumerate(self._unmet) if not unmet], 0.0)
        while self._events:
            now_s, ended = self._events[0][0], []
            while self._events and self._events[0][0] == now_s:
                _, _, version, state = heappop(self._events)
                if version == state.version:
                    ended.append(state)
            self._go_on([node for state in ended for node in self._end(state)], now_s)
            for state in ended:
                self._offer(state, now_s)
        assert all(run >= 0 for run in self._runs.last), "an op waits for one that its lane runs later"
        return self._runs

    def _go_on(self, freed: list[int], now_s: float) -> None:
        """Begin what can begin now that these nodes are ready: first the strategy's thread, which may submit something
        urgent."""
        states: dict[_LaneState, bool] = {}  # whether something urgent has become ready
        while freed:
            node = freed.pop()
            if (lane := self._graph.lanes[node]) is None:
                self._add_run(node, 0.0, None)
                freed += self._release(node)
            else:
                state = self._lanes[lane]
                states[state] = states.get(state, False) or self._graph.urgent[node]
        for state, urgent in states.items():
            self._offer(state, now_s, urgent=urgent)

    def _offer(self, state: _LaneState, now_s: float, *, urgent: bool = False) -> None:
        """Begin if the lane is idle. For an urgent op that has become ready, one of the normal class stops behind its
        present packet."""
        if state.running is None:
            return self._begin(state, now_s)
        if urgent and not self._graph.urgent[state.running] and state.packet_s > 0:
            num_packets = ceil((now_s - state.start_s) / state.packet_s)
            if num_packets < state.num_packets:
                state.num_packets = num_packets
                self._expect_end(state)

    def _begin(self, state: _LaneState, now_s: float) -> None:
        """Start what the lane runs next, if something is ready."""
        for waiting in (state.urgent, state.normal):
            if waiting and not self._unmet[waiting[0]]:
                node = waiting[0]
                state.running, state.start_s, state.packet_s = node, now_s, self._packet_s[node]
                state.num_packets = state.left.get(node, self._packets[node])
                return self._expect_end(state)

    def _expect_end(self, state: _LaneState) -> None:
        assert state.running is not None
        state.version += 1
        heappush(self._events, (state.end_s, state.running, state.version, state))

    def _end(self, state: _LaneState) -> list[int]:
        """End the lane's run; return the nodes that are ready because its op has ended."""
        node = state.running
        assert node is not None
        state.running = None
        self._add_run(node, state.num_packets * state.packet_s, state)
        left = state.left.pop(node, self._packets[node]) - state.num_packets
        if left:
            state.left[node] = left
            return []
        (state.urgent if self._graph.urgent[node] else state.normal).popleft()
        return self._release(node)

    def _release(self, node: int) -> list[int]:
        freed = []
        for follower in self._after[node]:
            self._unmet[follower] -= 1
            if not self._unmet[follower]:
                freed.append(follower)
        return freed

    def _add_run(self, node: int, own_s: float, state: _LaneState | None) -> None:
        runs = self._runs
        before = {runs.last[earlier] for earlier in self._graph.before[node]}
        if state is not None and state.latest is not None:
            before.add(state.latest)
        runs.nodes.append(node)
        runs.seconds.append(own_s)
        runs.before.append(tuple(sorted(before)))
        runs.last[node] = len(runs.nodes) - 1
        if state is not None:
            state.latest = runs.last[node]
