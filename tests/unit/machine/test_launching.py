"""The simulated machine where ops of the gpu lane are launched before they can begin."""

from __future__ import annotations

import pytest

from harness.machine.base import CPU, D2H, GPU, H2D, MachineError, Work
from harness.machine.simulated import SimulatedMachine
from harness.machine.virtual.contention import MeasuredTogether
from tests.unit.machine.ops import FreeOp

HANDOVER_S = 0.25


class Costing(FreeOp):
    """Costs `seconds`: its own, or those and the host's for launching it, or those by which it begins later."""

    def __init__(self, seconds: float | tuple[float, float], packets: int = 1, **touches: tuple) -> None:
        self.seconds, self.packets = seconds, packets
        self.reads, self.writes = touches.get("reads", ()), touches.get("writes", ())

    def work(self):
        return Work(link_bytes=1.0)


class Stated:
    def seconds(self, lane, op, work):
        return op.seconds


@pytest.fixture
def machine() -> SimulatedMachine:
    return made(launches_ahead=True)


def made(*, launches_ahead: bool, together: dict | None = None) -> SimulatedMachine:
    contention = MeasuredTogether.of_slowdowns(together or {})
    machine = SimulatedMachine(capacities_bytes={}, costs=Stated(), contention=contention)
    machine._lanes.host_times(0.0, 0.0, HANDOVER_S, HANDOVER_S)
    if launches_ahead:
        machine._lanes.launch_ahead("gpu")
    return machine


def ends(machine: SimulatedMachine, *tickets) -> list[float]:
    machine.drain()
    return [ticket.finished_s for ticket in tickets]


def test_an_op_launched_long_before_takes_its_own_time(machine):
    weights = machine.submit(H2D, Costing(10.0, writes=("w",)))
    expert = machine.submit(GPU, Costing((1.0, 3.0), reads=("w",)))
    assert ends(machine, weights, expert) == [10.0, 11.0], "and nothing is handed over"


@pytest.mark.parametrize(("own_s", "launching_s", "each_s"), [(1.0, 3.0, 3.0), (3.0, 1.0, 3.0), (2.0, 2.0, 2.0)])
def test_a_chain_takes_what_the_slower_of_launching_and_running_takes(machine, own_s, launching_s, each_s):
    chain = [machine.submit(GPU, Costing((own_s, launching_s), writes=("x",))) for _ in range(4)]
    assert ends(machine, *chain) == pytest.approx([each_s * number for number in (1, 2, 3, 4)])


def test_launching_behind_the_host_begins_when_the_host_has_handed_over(machine):
    attention = machine.submit(CPU, Costing(5.0, writes=("a",)))
    output = machine.submit(GPU, Costing((1.0, 3.0), reads=("a",)))
    assert ends(machine, attention, output) == [5.0, 5.0 + HANDOVER_S + 3.0]


def test_a_copy_counts_as_launched_when_its_last_packets_stand_in_the_stream(machine):
    weights = machine.submit(H2D, Costing(10.0, packets=10, writes=("w",)))
    expert = machine.submit(GPU, Costing((0.5, 3.0), reads=("w",)))
    assert ends(machine, weights, expert) == [10.0, 8.0 + 3.0]


def test_the_host_launches_in_the_lane_s_order(machine):
    """What the second op needs is there at once; it is launched behind the first one all the same."""
    weights = machine.submit(H2D, Costing(6.0, writes=("w",)))
    first = machine.submit(GPU, Costing((1.0, 2.0), reads=("w",)))
    second = machine.submit(GPU, Costing((1.0, 6.5)))
    assert ends(machine, weights, first, second) == [6.0, 7.0, 8.5]


def test_launching_begins_no_sooner_than_the_submission(machine):
    route = machine.submit(D2H, Costing(4.0))
    machine.wait(route)
    expert = machine.submit(GPU, Costing((1.0, 3.0)))
    assert ends(machine, expert) == [4.0 + 3.0]


def test_what_is_submitted_while_a_copy_runs_follows_its_launch(machine):
    weights = machine.submit(H2D, Costing(10.0, packets=4, writes=("w",)))
    machine.wait(machine.submit(D2H, Costing(1.0)))
    expert = machine.submit(GPU, Costing((1.0, 7.0), reads=("w",)))
    assert ends(machine, weights, expert) == [10.0, 5.0 + 7.0]


def test_an_op_of_one_number_costs_that(machine):
    first = machine.submit(GPU, Costing(2.0, writes=("x",)))
    second = machine.submit(GPU, Costing((1.0, 0.5), reads=("x",)))
    assert ends(machine, first, second) == [2.0, 3.0]


def test_an_op_that_nobody_launches_begins_later_by_the_second_number():
    """Its lane is taken from then on. What interrupts it comes behind its first packet, or in front of it."""
    machine = made(launches_ahead=False)
    late = machine.submit(GPU, Costing((1.0, 3.0), writes=("x",)))
    behind = machine.submit(GPU, Costing(1.0))
    copied = machine.submit(H2D, Costing((4.0, 2.0), packets=4))
    urgent = machine.submit(H2D, Costing(1.0, reads=("x",)), urgent=True)
    assert ends(machine, late, behind, copied, urgent) == [4.0, 5.0, 7.0, 5.0]
    assert [each.started_s for each in (late, behind, copied, urgent)] == [3.0, 4.0, 2.0, 4.0]
    spans = sorted((str(s.lane), s.start_s, s.end_s) for s in machine.spans)
    assert spans == [("gpu", 3.0, 4.0), ("gpu", 4.0, 5.0), ("h2d", 2.0, 4.0), ("h2d", 4.0, 5.0), ("h2d", 5.0, 7.0)]


def test_what_makes_an_op_slower_does_not_make_it_begin_even_later():
    """Beside the cpu lane the gpu lane takes twice as long, but for the seconds in which it does nothing yet."""
    machine = made(launches_ahead=False, together={"cpu+gpu": {"cpu": 1.0, "gpu": 2.0}})
    beside = [machine.submit(CPU, Costing(seconds)) for seconds in (1.0, 3.0)]
    late = machine.submit(GPU, Costing((2.0, 2.0)))
    assert ends(machine, *beside, late) == [1.0, 4.0, 5.0]
    assert late.started_s == 2.0
    assert [(s.start_s, s.end_s) for s in machine.spans if s.lane == GPU] == [(2.0, 5.0)]


def test_what_follows_a_late_copy_is_launched_once_that_has_begun_and_all_but_two_packets_are_through(machine):
    weights = machine.submit(H2D, Costing((10.0, 4.0), packets=10, writes=("w",)))
    expert = machine.submit(GPU, Costing((1.0, 7.0), reads=("w",)))
    assert ends(machine, weights, expert) == [14.0, 4.0 + 8.0 + 7.0]


def test_an_op_that_has_not_begun_yet_is_not_busy_yet():
    machine = made(launches_ahead=False)
    machine.submit(GPU, Costing((1.0, 3.0)))
    beside = [machine.submit(CPU, Costing(seconds)) for seconds in (2.0, 1.5)]
    machine.wait(beside[0])
    assert [total.busy_s for (lane, _), total in machine.totals().items() if lane == GPU] == []
    machine.wait(beside[1])
    assert [total.busy_s for (lane, _), total in machine.totals().items() if lane == GPU] == [0.5]


@pytest.mark.parametrize("cost", [(1.0, -0.5), (1.0, float("nan")), (1.0, 2.0, 3.0)])
def test_numbers_that_make_no_cost_are_refused(cost):
    machine = made(launches_ahead=False)
    machine.submit(GPU, Costing(cost))
    with pytest.raises(MachineError, match=r"which no clock can show|one number or two"):
        machine.drain()


def test_other_lanes_are_as_they_were():
    def run(machine: SimulatedMachine) -> list[float]:
        weights = machine.submit(H2D, Costing(3.0, packets=3, writes=("w",)))
        stored = machine.submit(CPU, Costing(2.0, reads=("w",), writes=("k",)))
        back = machine.submit(D2H, Costing(1.0, reads=("k",)))
        return ends(machine, weights, stored, back)

    assert run(made(launches_ahead=True)) == run(made(launches_ahead=False))
