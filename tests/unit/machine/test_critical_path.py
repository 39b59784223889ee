"""The graph of what a pipeline submits: whole, with every edge, as long as the run it stands for (MoE-Gen, Eq. 4)."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.machine.base import CPU, D2H, GPU, H2D
from harness.machine.critical_path import critical_path, in_lane_order
from harness.machine.recording import RecordingMachine
from harness.machine.simulated import SimulatedMachine
from kernels.simulation import in_lane_order as native_order
from tests.unit.machine.lane_order import played
from tests.unit.machine.ops import Quick
from tests.unit.machine.programs import LANES, Log, Recorded, conflict, programs
from tests.unit.machine.test_simulated_reference import JobOp, Lone, actions


class Told(Quick):
    """Brings what the world says."""

    def __init__(self, **touches: tuple) -> None:
        super().__init__(**touches)
        self.foreseen = None

    def foresee(self, world):
        self.foreseen = world["before"]

    def imagine(self, world):
        return world["value"]


def recorder(world=None) -> RecordingMachine:
    return RecordingMachine(capacities_bytes={"device": 100}, world=world)


def test_edges_are_data_lanes_and_what_the_strategy_waited_for():
    machine = recorder()
    load = machine.submit(H2D, Quick(writes=("w",)))
    machine.wait(load)
    machine.submit(GPU, Quick(reads=("w",), writes=("x",)))  # 2: the thread that went on is node 1
    machine.submit(H2D, Quick(writes=("v",)))  # 3
    machine.submit(H2D, Quick(), urgent=True)  # 4
    machine.submit(GPU, Quick(reads=("w",)))  # 5
    machine.submit(H2D, Quick(writes=("w",)))  # 6
    graph = machine.graph()
    assert graph.ops[1] is None and graph.lanes[1] is None
    assert list(graph.before) == [(), (0,), (0, 1), (0, 1), (1,), (0, 1, 2), (1, 2, 3, 5)]
    assert graph.urgent == (False, False, False, False, True, False, False)


def test_an_edge_stays_after_the_op_that_was_waited_for():
    """Machines forget what is over; a graph in steady state may not."""
    machine = recorder()
    first = machine.submit(H2D, Quick(writes=("w",)))
    machine.wait(first)
    machine.wait_any([machine.submit(CPU, Quick())])
    machine.submit(GPU, Quick(reads=("w",)))
    assert 0 in machine.graph().before[-1]


def test_what_came_before_the_recording_is_no_node_and_nothing_waits_for_it():
    machine = RecordingMachine(capacities_bytes={"device": 100}, world={"before": 3, "value": "routes"}, records=False)
    before = machine.submit(H2D, Told(writes=("w",)))
    assert before.done and before.settled and before.op.foreseen == 3
    machine.records = True
    assert machine.wait(before) == "routes"
    machine.wait_any([before])
    machine.drain()
    machine.submit(GPU, Quick(reads=("w",)), after=[before])
    machine.submit(GPU, Quick(writes=("w",)))
    assert list(machine.graph().before) == [(), (0,)]


def test_values_come_from_the_world():
    machine = recorder({"before": 3, "value": "routes"})
    tickets = [machine.submit(D2H, Told()) for _ in range(2)]
    assert tickets[0].op.foreseen == 3
    assert machine.wait(tickets[1]) == "routes"
    assert machine.wait_any(tickets) == tickets and tickets[0].value == "routes"
    assert not machine.cancel(tickets[0]), "it counts as over"


def test_what_was_reserved_is_accounted_for():
    machine = recorder()
    machine.tiers["device"].reserve("slots", 60)
    assert machine.tiers["device"].holders() == {"slots": 60}
    with pytest.raises(RuntimeError, match="'more' needs 50 B, 40 B of 100 B are free"):
        machine.tiers["device"].reserve("more", 50)


@given(programs())
@settings(max_examples=60, deadline=None)
def test_edges_lead_from_every_op_that_must_come_first(steps):
    """Against conflicts by brute force: each leads to its later op, over other ops or at once; and no other edge is
    about data."""
    machine = recorder()
    tickets, log = [], Log()
    for number, step in enumerate(steps):
        after = [tickets[earlier] for earlier in sorted(step.after)]
        op = Recorded(log, number, step, 0.0)
        tickets.append(machine.submit(LANES[step.lane], op, after=after, urgent=step.urgent))
    before = machine.graph().before
    reached: list[set[int]] = []
    for earlier in before:
        reached.append(set(earlier).union(*(reached[node] for node in earlier)))
    for number, step in enumerate(steps):
        must = {n for n in range(number) if conflict(steps[n], step)} | step.after
        mates = {n for n in range(number) if (steps[n].lane, steps[n].urgent) == (step.lane, step.urgent)}
        assert must | mates <= reached[number]
        assert set(before[number]) <= must | mates


def all_paths(before: list[tuple[int, ...]], node: int) -> list[list[int]]:
    return [[node]] if not before[node] else [[*p, node] for n in before[node] for p in all_paths(before, n)]


@st.composite
def graphs(draw) -> tuple[list[tuple[int, ...]], list[float]]:
    count = draw(st.integers(1, 9))
    before = [tuple(sorted(draw(st.frozensets(st.integers(0, n - 1), max_size=3)) if n else ())) for n in range(count)]
    return before, [draw(st.integers(0, 5)) / 2 for _ in range(count)]


@given(graphs())
@settings(max_examples=100, deadline=None)
def test_the_critical_path_is_the_longest_of_all_paths(graph):
    before, seconds = graph
    found = critical_path(before, seconds)
    lengths = [max(sum(seconds[n] for n in path) for path in all_paths(before, node)) for node in range(len(before))]
    assert found.ends_s == pytest.approx(lengths)
    assert found.seconds == pytest.approx(max(lengths))
    assert sum(seconds[n] for n in found.nodes) == pytest.approx(found.seconds)
    assert all(earlier in before[node] for earlier, node in pairwise(found.nodes))
    assert not before[found.nodes[0]]


def test_a_graph_without_nodes_takes_no_time():
    found = critical_path([], [])
    assert (found.seconds, found.nodes) == (0.0, [])


def submitted_and_awaited(steps: list[tuple]) -> list[tuple]:
    return [(what, *rest) for what, *rest in steps if what in ("submit", "wait")]


def play(machine, steps: list[tuple]) -> list:
    tickets = []
    for what, it in steps:
        if what == "submit":
            after = [tickets[i] for i in sorted(it.after)]
            tickets.append(machine.submit(it.lane, JobOp(it), after=after, urgent=it.urgent))
        else:
            for number in it:
                machine.wait(tickets[number])
    return tickets


def both(steps: list[tuple]) -> tuple[list, RecordingMachine, list[float]]:
    simulated = SimulatedMachine(capacities_bytes={}, costs=Lone(), host_bytes_s=float("inf"))
    tickets = play(simulated, steps)
    simulated.drain()
    simulated.now()
    recording = recorder()
    play(recording, steps)
    return tickets, recording, [op.seconds if op else 0.0 for op in recording.graph().ops]


@given(actions(max_size=16))
@settings(max_examples=100, deadline=None)
def test_ops_in_fifo_order_take_as_long_as_they_do_where_nothing_is_shared(steps):
    tickets, recording, seconds = both(
        [(what, replace(it, urgent=False) if what == "submit" else it) for what, it in submitted_and_awaited(steps)]
    )
    graph = recording.graph()
    found = critical_path(graph.before, seconds)
    ends_s = [end_s for end_s, op in zip(found.ends_s, graph.ops, strict=True) if op is not None]
    assert ends_s == pytest.approx([ticket.finished_s for ticket in tickets])
    assert found.seconds == pytest.approx(max(ticket.finished_s for ticket in tickets))


@given(actions(max_size=16), st.integers(0, 1 << 20))
@settings(max_examples=150, deadline=None)
def test_lanes_in_order_run_urgent_ops_between_packets_as_the_simulated_machine_does(steps, seed):
    """Durations are drawn so that no two ops end at the same moment, where either may go first."""
    rng = random.Random(seed)
    tickets, recording, seconds = both(
        [
            (what, replace(it, seconds=rng.uniform(0.1, 3.0)) if what == "submit" else it)
            for what, it in submitted_and_awaited(steps)
        ]
    )
    graph = recording.graph()
    runs = in_lane_order(graph, seconds)
    found = critical_path(runs.before, runs.seconds)
    ends_s = [found.ends_s[runs.last[n]] for n, op in enumerate(graph.ops) if op is not None]
    assert ends_s == pytest.approx([ticket.finished_s for ticket in tickets])
    by_node = Counter()
    for node, own_s in zip(runs.nodes, runs.seconds, strict=True):
        by_node[node] += own_s
    assert [by_node[node] for node in range(len(graph))] == pytest.approx(seconds)


@given(actions(max_size=24), st.integers(0, 1 << 20))
@settings(max_examples=150, deadline=None)
def test_ops_that_end_at_the_same_moment_are_ordered_as_in_plain_python(steps, seed):
    """A plan is chosen by these orders: they must not depend on who computes them."""
    rng = random.Random(seed)
    recording = recorder()
    play(recording, submitted_and_awaited(steps))
    graph = recording.graph()
    seconds = [rng.choice((0.0, 0.5, 1.0, 2.0, 4.0)) if op else 0.0 for op in graph.ops]
    assert in_lane_order(graph, seconds) == played(graph, seconds)


@pytest.mark.parametrize(
    "wrong", [{"lane": [-2]}, {"lane": [1]}, {"packets": [0]}, {"packet_s": [float("nan")]}, {"before": [(0,)]},
              {"urgent": []}]
)  # fmt: skip
def test_graphs_that_make_no_sense_are_refused(wrong):
    sound = {"lane": [0], "urgent": [False], "packets": [1], "packet_s": [1.0], "before": [()]}
    assert native_order(**sound)[0] == [0]
    with pytest.raises(ValueError, match="node"):
        native_order(**{**sound, **wrong})


def test_an_urgent_op_waits_for_a_packet_and_not_for_the_op():
    machine = recorder()
    machine.submit(H2D, Quick(packets=4, writes=("w",)))
    machine.submit(GPU, Quick(writes=("x",)))
    machine.submit(H2D, Quick(reads=("x",)), urgent=True)
    machine.submit(GPU, Quick(reads=("w",)))
    graph, seconds = machine.graph(), [8.0, 3.0, 1.0, 1.0]
    assert critical_path(graph.before, seconds).seconds == 9.0, "in the class edges alone, two ops share the link"
    runs = in_lane_order(graph, seconds)
    found = critical_path(runs.before, runs.seconds)
    assert [found.ends_s[run] for run in runs.last] == [9.0, 3.0, 5.0, 10.0]
    assert [runs.nodes[run] for run in found.nodes] == [0, 2, 0, 3]
