"""What a long run must not do: keep what is over, or slow down."""

from __future__ import annotations

import gc
import resource
import weakref
from itertools import pairwise
from pathlib import Path

import pytest

from harness.machine.base import CPU, D2H, GPU, H2D, LaneKind, Ticket
from harness.machine.costs import LaneCost, Roofline
from harness.machine.queues import Board
from harness.machine.shuffled import ShuffledMachine
from harness.machine.simulated import SimulatedMachine
from tests.unit.machine.ops import Quick

LANES = (GPU, CPU, H2D, D2H)


def shuffled() -> ShuffledMachine:
    return ShuffledMachine(capacities_bytes={}, seed=0, eager=0.5)


def simulated(**settings) -> SimulatedMachine:
    costs = Roofline(lanes={kind: LaneCost(overhead_s=1e-5) for kind in LaneKind})
    return SimulatedMachine(**{"capacities_bytes": {}, "costs": costs, "host_bytes_s": 1e9} | settings)


def live_tickets() -> int:
    gc.collect()
    return sum(type(thing) is Ticket for thing in gc.get_objects())


@pytest.mark.parametrize("name", ["emulated", "shuffled", "simulated"])
def test_tickets_of_finished_ops_are_forgotten(name, emulated):
    """Readers of weights that are never written, a chain of writers, cancelled ops: none may keep its past alive."""
    machine = {"emulated": emulated, "shuffled": shuffled, "simulated": simulated}[name]()
    before = live_tickets()
    for number in range(3000):
        op = Quick(reads=("resident", number % 5), writes=(5 + number % 7,))
        ticket = machine.submit(LANES[number % 4], op, urgent=number % 9 == 0)
        if number % 10 == 0:
            machine.cancel(machine.submit(H2D, Quick(writes=(number % 5,)), after=[ticket]))
        if number % 50 == 0:
            machine.wait(ticket)
    machine.drain()
    machine.submit(GPU, Quick(reads=("resident",)))
    machine.drain()
    del ticket, op
    assert live_tickets() - before < 150


def test_many_pending_readers_of_one_key_are_registered_in_linear_time():
    """Counted, not timed: how often registration looks at a reader that is still pending."""
    board, looked, num_reading = Board(), 0, 2000
    effective = board._hazards._effective

    def counting(tickets):
        nonlocal looked
        tickets = list(tickets)
        looked += len(tickets)
        return effective(tickets)

    board._hazards._effective = counting
    for _ in range(num_reading):
        board.submit(GPU, Quick(reads=("k",)), (), urgent=False)
    assert num_reading < looked < 4 * num_reading


def test_a_simulation_that_keeps_totals_needs_no_more_memory_the_longer_it_is():
    """20,000 more ops, of which a span each would be 1.7 MB, add nearly nothing, at least once: now and then the
    system itself gives a process another large page."""
    machine = simulated(keep_spans="totals")
    resident_bytes = []
    for _ in range(4):
        for number in range(20_000):
            ticket = machine.submit(LANES[number % 4], Quick(reads=("resident",), writes=(number % 100,)))
            if number % 200 == 0:
                machine.wait(ticket)
        machine.drain()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        resident_bytes.append(pages * resource.getpagesize())
    assert sum(total.num_ops for total in machine.totals().values()) == 80_000
    assert min(after - before for before, after in pairwise(resident_bytes)) < 500_000


def test_a_machine_that_its_own_costs_know_is_collected():
    """As with calibrated costs, which ask the machine whether the link is busy; ops that never ran go with it."""

    class Asking:
        def __init__(self) -> None:
            self.machine = simulated(costs=self)

        def seconds(self, lane, op, work) -> float:
            return 1.0 if self.machine.is_busy(LaneKind.H2D) else 2.0

    costs = Asking()
    op = Quick(result=costs)
    first = costs.machine.submit(H2D, op)
    costs.machine.submit(H2D, op)
    costs.machine.wait(first)
    alive = weakref.ref(costs)
    del costs, op, first
    gc.collect()
    assert alive() is None
