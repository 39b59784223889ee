"""The simulated machine against the slow exact one: random ops, lanes, urgency, packets, waits and cancels."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.hardware.profile import MemorySharing
from harness.machine.base import CPU, D2H, GPU, H2D, Lane, LaneKind, Op, Work
from harness.machine.simulated import SimulatedMachine
from harness.machine.virtual.contention import SharedMemory
from harness.record.spans import SpanTable
from tests.unit.machine.reference_simulator import Job, ReferenceSimulator

LANES = (GPU, CPU, H2D, D2H, Lane(LaneKind.GPU, 1))
KEYS = ("a", "b", "c", "d")
HOST_BYTES_S = 6


class JobOp(Op):
    kind = "job"

    def __init__(self, job: Job) -> None:
        self.seconds = float(job.seconds)
        self.host_bytes = float(job.seconds * job.demand)
        self.reads, self.writes, self.packets = tuple(job.reads), tuple(job.writes), job.packets

    def work(self) -> Work:
        return Work(flops=self.seconds, host_bytes=self.host_bytes)


class Lone:
    def seconds(self, lane, op, work):
        return op.seconds


class Launched:
    """Costs ops of gpu lanes their own seconds and `launching_s` of the host's."""

    def __init__(self, launching_s: float) -> None:
        self.launching_s = launching_s

    def seconds(self, lane, op, work):
        return (op.seconds, self.launching_s) if lane.kind is LaneKind.GPU else op.seconds


@st.composite
def actions(draw, max_size: int = 22) -> list[tuple]:
    """("submit", job), ("wait", numbers), ("cancel", number) or ("now",), in the order of a strategy's calls."""
    made: list[tuple] = []
    number = 0
    keys = st.frozensets(st.sampled_from(KEYS), max_size=2)
    for _ in range(draw(st.integers(1, max_size))):
        what = (
            draw(st.sampled_from(("submit", "submit", "submit", "submit", "wait", "cancel", "now"))) if number else ""
        )
        if what == "wait":
            made.append(("wait", draw(st.lists(st.integers(0, number - 1), min_size=1, max_size=3, unique=True))))
        elif what == "cancel":
            made.append(("cancel", draw(st.integers(max(0, number - 4), number - 1))))
        elif what == "now":
            made.append(("now",))
        else:
            job = Job(
                lane=draw(st.sampled_from(LANES)),
                seconds=Fraction(draw(st.integers(0, 24)), 8),
                demand=Fraction(draw(st.sampled_from((0, 0, 2, 3, 5, 10)))),
                packets=draw(st.sampled_from((1, 1, 2, 4, 5))),
                urgent=draw(st.sampled_from((False, False, True))),
                reads=draw(keys),
                writes=draw(keys),
                after=draw(st.frozensets(st.integers(0, number - 1), max_size=1)) if number else frozenset(),
            )
            made.append(("submit", job))
            number += 1
    return made


def play_reference(steps: list[tuple], **options) -> tuple[ReferenceSimulator, list]:
    reference, seen = ReferenceSimulator(Fraction(HOST_BYTES_S), **options), []
    for what, *argument in steps:
        if what == "submit":
            reference.submit(argument[0])
        elif what == "wait":
            seen.append(reference.wait_any(argument[0]))
        elif what == "cancel":
            seen.append(reference.cancel(argument[0]))
        else:
            seen.append(float(reference.now()))
    reference.drain()
    seen.append(float(reference.now()))
    return reference, seen


def play(steps: list[tuple], *, launching_s: float | None = None, **options) -> tuple[SimulatedMachine, list, list]:
    costs = Lone() if launching_s is None else Launched(launching_s)
    machine = SimulatedMachine(capacities_bytes={}, costs=costs, **options)
    if launching_s is not None:
        machine._lanes.launch_ahead("gpu")
    tickets, seen = [], []
    for what, *argument in steps:
        if what == "submit":
            job = argument[0]
            after = [tickets[i] for i in sorted(job.after)]
            tickets.append(machine.submit(job.lane, JobOp(job), after=after, urgent=job.urgent))
        elif what == "wait":
            seen.append([t.number for t in machine.wait_any([tickets[n] for n in argument[0]])])
        elif what == "cancel":
            seen.append(machine.cancel(tickets[argument[0]]))
        else:
            seen.append(machine.now())
    machine.drain()
    seen.append(machine.now())
    return machine, seen, tickets


def assert_same(steps: list[tuple], machine: SimulatedMachine, tickets: list, reference: ReferenceSimulator) -> None:
    expected = sorted((float(start), number, packet, float(end)) for number, packet, _, start, end in reference.spans)
    found = sorted((s.start_s, s.ticket, s.packet, s.end_s) for s in machine.spans)
    by_op = [(number, packet) for _, number, packet, _ in sorted(expected, key=lambda e: e[1:3])]
    assert [(s.ticket, s.packet) for s in sorted(machine.spans, key=lambda s: (s.ticket, s.packet))] == by_op
    for (start, *_, end), (start_s, *_, end_s) in zip(
        sorted(expected, key=lambda e: e[1:3]), sorted(found, key=lambda e: e[1:3]), strict=True
    ):
        assert (start_s, end_s) == pytest.approx((start, end), abs=1e-9)
    for number, ticket in enumerate(tickets):
        if number in reference.ended:
            times = (float(reference.started[number]), float(reference.ended[number]))
            assert (ticket.started_s, ticket.finished_s) == pytest.approx(times, abs=1e-9)
        else:
            assert number in reference.cancelled
            assert not ticket.done
    flops = sum(s.work.flops for s in machine.spans)
    assert flops == pytest.approx(sum(float(reference.jobs[n].seconds) for n in reference.ended))


TIMES = st.sampled_from((Fraction(0), Fraction(1, 8), Fraction(3, 4)))


@settings(max_examples=400)
@given(actions(), TIMES, TIMES)
def test_spans_waits_and_cancels_are_those_of_the_reference(steps, submit_s, wake_s):
    reference, expected = play_reference(steps, submit_s=submit_s, wake_s=wake_s)
    times = {"submit_s": float(submit_s), "wake_s": float(wake_s)}
    machine, seen, tickets = play(steps, host_bytes_s=float(HOST_BYTES_S), **times)
    assert seen == [pytest.approx(e, abs=1e-9) if isinstance(e, float) else e for e in expected]
    assert_same(steps, machine, tickets, reference)


@settings(max_examples=200)
@given(actions(), TIMES)
def test_launching_that_takes_no_time_changes_nothing(steps, submit_s):
    reference, expected = play_reference(steps, submit_s=submit_s)
    machine, seen, tickets = play(steps, launching_s=0.0, host_bytes_s=float(HOST_BYTES_S), submit_s=float(submit_s))
    assert seen == [pytest.approx(e, abs=1e-9) if isinstance(e, float) else e for e in expected]
    assert_same(steps, machine, tickets, reference)


@settings(max_examples=200)
@given(actions(), st.sampled_from((0.125, 2.0)))
def test_the_host_launches_one_op_after_another(steps, launching_s):
    """Whatever else happens: the n-th op to begin on a lane ends no sooner than n launchings take."""
    _, _, tickets = play(steps, launching_s=launching_s, host_bytes_s=float(HOST_BYTES_S))
    for lane in (lane for lane in LANES if lane.kind is LaneKind.GPU):
        begun = sorted((t for t in tickets if t.done and t.lane == lane), key=lambda t: (t.started_s, t.number))
        for place, ticket in enumerate(begun, start=1):
            assert ticket.finished_s >= place * launching_s - 1e-9
            assert ticket.finished_s - ticket.started_s >= ticket.op.seconds - 1e-9
    assert all(t.done for t in tickets if t.state != "cancelled")


def test_a_chain_of_cancelled_ops_passes_on_what_came_before_all_of_it():
    """The last of the chain is cancelled first, so that it passes an op on which is then cancelled too."""
    a, b = frozenset("a"), frozenset("b")
    jobs = [
        Job(GPU, Fraction(1), writes=a),
        Job(CPU, Fraction(1), reads=a),
        Job(CPU, Fraction(1), writes=b, after=frozenset({1})),
    ]
    follower = Job(D2H, Fraction(1), reads=b)
    steps = [*(("submit", job) for job in jobs), ("cancel", 2), ("cancel", 1), ("submit", follower)]
    reference, expected = play_reference(steps)
    machine, seen, tickets = play(steps, host_bytes_s=float(HOST_BYTES_S))
    assert seen == expected and tickets[3].started_s == 1.0
    assert_same(steps, machine, tickets, reference)


@settings(max_examples=150)
@given(actions())
def test_proportional_sharing_is_that_of_the_reference(steps):
    reference, expected = play_reference(steps, proportional=True)
    machine, seen, tickets = play(steps, contention=SharedMemory(float(HOST_BYTES_S), MemorySharing.PROPORTIONAL))
    assert seen == [pytest.approx(e, abs=1e-9) if isinstance(e, float) else e for e in expected]
    assert_same(steps, machine, tickets, reference)


@settings(max_examples=60)
@given(actions())
def test_the_same_program_gives_the_same_spans_bit_for_bit_in_both_ways_to_keep_them(steps):
    (one, seen, _), (two, seen_again, _) = (play(steps, host_bytes_s=4.0) for _ in range(2))
    assert one.spans == two.spans
    assert one.spans.columns()[0].tobytes() == two.spans.columns()[0].tobytes()
    assert seen == seen_again
    sums, _, _ = play(steps, host_bytes_s=4.0, keep_spans="totals")
    assert len(sums.spans) == 0
    kept, summed = one.totals(), sums.totals()
    assert kept.keys() == summed.keys()
    for key, totals in kept.items():
        assert tuple(totals) == pytest.approx(tuple(summed[key]))


@settings(max_examples=60)
@given(actions())
def test_metrics_read_the_columns_as_they_would_read_the_spans(steps):
    machine, _, _ = play(steps, host_bytes_s=float(HOST_BYTES_S))
    columns, objects = SpanTable.of(machine.spans), SpanTable.of(list(machine.spans))
    assert list(columns.lanes) == list(objects.lanes)
    for lane, spans in columns.lanes.items():
        assert spans.rows.tolist() == objects.lanes[lane].rows.tolist()
        names, other_names = ([table.kinds[k] for k in table.lanes[lane].kind] for table in (columns, objects))
        assert names == other_names
