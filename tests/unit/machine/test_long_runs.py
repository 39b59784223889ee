"""What a long run must not do: keep what is over, or slow down."""

from __future__ import annotations

import gc
import random
import resource
import tracemalloc
import weakref
from itertools import pairwise
from pathlib import Path

import pytest

from harness.machine.base import CPU, D2H, GPU, H2D, Lane, LaneKind, Span, Ticket, Work
from harness.machine.packed_spans import PackedSpans
from harness.machine.queues import Board
from harness.machine.shuffled import ShuffledMachine
from harness.machine.simulated import SimulatedMachine
from harness.machine.virtual.costs import LaneCost, Roofline
from harness.record.activity import Activity
from harness.record.metrics import kind_totals, utilization
from harness.record.spans import SpanColumns
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
    """Counted, not timed: how many readers are pending each time that registration has looked at all of them, after
    which it says when it will look again."""
    board, looked, num_reading = Board(), [], 2000
    next_look = None
    for _ in range(num_reading):
        board.submit(GPU, Quick(reads=("k",)), (), urgent=False)
        touched = board._hazards.keys["k"]
        if next_look not in (None, touched.sift_at):
            looked.append(len(touched.readers))
        next_look = touched.sift_at
    assert len(looked) > 1 and sum(looked) < 4 * num_reading


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


def test_spans_are_kept_packed_and_read_as_they_were(emulated):
    """Compared with a list of the same spans: as sequences, in metrics and in a trace."""
    rng = random.Random(0)
    packed, listed = PackedSpans(), []
    for number in range(10_000):
        start_s = rng.random() * 1e4
        lane, layer = Lane(rng.choice(list(LaneKind)), rng.randrange(3)), rng.choice([None, 0, 70])
        span = Span(
            lane, rng.choice(["experts", "weights"]), layer, rng.choice([None, 0, 5]), number, rng.randrange(4), 4,
            rng.random() < 0.5, start_s, start_s + rng.random(), rng.random(), Work(*(rng.random() * 1e12,) * 4),
        )  # fmt: skip
        listed.append(span)
        packed.append(span)
    assert len(packed) == 10_000 and packed == listed
    assert packed[4095:4100] == listed[4095:4100] and packed[-1] == listed[-1] and packed[::3000] == listed[::3000]
    window = (2000.0, 7000.0)
    assert kind_totals(Activity.of(packed, window)) == kind_totals(Activity.of(listed, window))
    assert utilization(Activity.of(packed, window)) == utilization(Activity.of(listed, window))
    for first in (1, 4095, 4096, 5000, 8192, 10_000):
        assert Activity.of(SpanColumns.of(packed, first), window) == Activity.of(listed[first:], window)
    assert isinstance(emulated().spans, PackedSpans)
    packed.clear()
    assert list(packed) == [] and len(packed) == 0


def test_a_machine_keeps_less_than_a_hundred_bytes_of_an_op(emulated):
    """Held memory as Python counts it: 5,000 ops after as many that filled whatever does not grow."""
    machine = emulated()

    def run_ops() -> None:
        for number in range(5000):
            ticket = machine.submit(LANES[number % 4], Quick(writes=(number % 7,)))
            if number % 50 == 0:
                machine.wait(ticket)
        machine.drain()

    run_ops()
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        run_ops()
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(machine.spans) == 10_000
    assert after - before < 5000 * 100 + 4096 * 88, "and a chunk that is not full"
