"""Both machines respect every dependency of random programs, as a brute-force oracle derives them."""

from __future__ import annotations

from itertools import pairwise, permutations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.machine import hazards
from harness.machine.base import CPU, GPU, H2D
from harness.machine.emulated import EmulatedMachine
from harness.machine.queues import Board
from harness.machine.shuffled import ShuffledMachine
from harness.machine.simulated import SimulatedMachine
from tests.unit.machine.ops import FreeOp
from tests.unit.machine.programs import (
    LANES,
    Step,
    check_order,
    check_refusals,
    conflict,
    predecessors,
    programs,
    run_program,
)


def shuffled(seed: int, eager: float = 0.5) -> ShuffledMachine:
    return ShuffledMachine(capacities_bytes={}, seed=seed, eager=eager)


@settings(max_examples=120)
@given(programs(), st.integers(0, 2**32), st.sampled_from((0.0, 0.5, 1.0)))
def test_shuffled_machine_respects_every_dependency(steps, seed, eager):
    run = run_program(shuffled(seed, eager), steps)
    check_order(steps, run)
    check_refusals(steps, run)


@settings(max_examples=25)
@given(programs(max_size=16))
def test_emulated_machine_respects_every_dependency_and_lane_order(steps):
    machine = EmulatedMachine(capacities_bytes={}, rates={})
    try:
        run = run_program(machine, steps, sleep_s=2e-4)
    finally:
        machine.close()
    check_order(steps, run)
    check_refusals(steps, run)
    for lane in range(len(LANES)):
        for urgent in (False, True):
            mine = [n for n, s in enumerate(steps) if (s.lane, s.urgent) == (lane, urgent) and n not in run.cancelled]
            assert run.log.first_packets(mine) == mine, "a FIFO class ran out of order"
        spans = sorted((s for s in machine.spans if s.lane == LANES[lane]), key=lambda s: s.start_s)
        assert all(a.end_s <= b.start_s for a, b in pairwise(spans)), "a lane ran two packets at once"


class Costs:
    """Durations without a pattern, the same for the same op."""

    def seconds(self, lane, op, work):
        return 1.0 + op.number * 7 % 5


@settings(max_examples=80)
@given(programs(), st.sampled_from((0.0, 0.3, 2.0)))
def test_simulated_machine_respects_every_dependency_and_lane_order(steps, submit_s):
    machine = SimulatedMachine(capacities_bytes={}, costs=Costs(), host_bytes_s=1.0, world=None, submit_s=submit_s)
    run = run_program(machine, steps)
    before, kept = predecessors(steps, run.cancelled), [n for n in range(len(steps)) if n not in run.cancelled]
    for number in kept:
        for first in before[number]:
            assert run.tickets[first].finished_s <= run.tickets[number].started_s + 1e-9
    for lane, urgent in product(range(len(LANES)), (False, True)):
        mine = [run.tickets[n] for n in kept if (steps[n].lane, steps[n].urgent) == (lane, urgent)]
        assert all(a.finished_s <= b.started_s + 1e-9 for a, b in pairwise(mine)), "a FIFO class ran out of order"


@settings(max_examples=30)
@given(programs(), st.integers(0, 99))
def test_shuffled_machine_repeats_itself_for_a_seed(steps, seed):
    assert run_program(shuffled(seed), steps).log.events == run_program(shuffled(seed), steps).log.events


def test_shuffled_machine_finds_every_legal_order():
    """Nothing is held back without a reason: lane order and urgency do not count, two readers do not conflict."""

    def step(reads: str, writes: str) -> Step:
        return Step(0, frozenset(reads), frozenset(writes), 1, False, frozenset(), None, False)

    steps = [step("", "a"), step("a", "b"), step("a", "c"), step("bc", "d"), step("", "")]
    legal = {
        order
        for order in permutations(range(len(steps)))
        if all(order.index(i) < order.index(j) for j in range(5) for i in range(j) if conflict(steps[i], steps[j]))
    }
    seen = {
        tuple(run_program(shuffled(seed, eager=0.1), steps).log.first_packets(list(range(5)))) for seed in range(400)
    }
    assert seen == legal


@settings(max_examples=80)
@given(programs(max_size=40), st.integers(0, 2**32))
def test_keys_that_are_forgotten_in_between_change_nothing(steps, seed):
    """Those that do not matter any more are looked for whenever a new one comes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hazards, "_SWEEP_KEYS_FROM", 0)
        machine = shuffled(seed)
        run = run_program(machine, steps)
    check_order(steps, run)


class Touch(FreeOp):
    def __init__(self, reads: tuple = (), writes: tuple = ()) -> None:
        self.reads, self.writes = reads, writes

    def run(self, ctx, packet):
        return None


def test_what_is_no_ticket_is_refused():
    with pytest.raises(TypeError, match="Ticket"):
        Board().submit(H2D, Touch(), ("a",), urgent=False)


def test_dependencies_stand_in_the_order_in_which_they_were_found():
    """A ticket waits first for what `after` names, then by key for what is read and what is written; for each once."""
    board = Board()
    first, second, third = (board.submit(H2D, Touch(writes=(key,)), (), urgent=False) for key in "abc")
    last = board.submit(GPU, Touch(reads=("b", "a"), writes=("c", "b")), (third,), urgent=False)
    assert list(last.waits_for) == [third, second, first] and last.num_unmet == 3
    assert all(ticket.dependents == [last] for ticket in (first, second, third))


def test_a_dependency_inherited_twice_counts_once():
    """Two cancelled writers pass the same predecessor on: what follows both must not become ready (and run) twice."""
    board = Board()
    first = board.submit(H2D, Touch(writes=("a", "b")), (), urgent=False)
    for key in "ab":
        assert board.cancel(board.submit(H2D, Touch(writes=(key,)), (), urgent=False))
    last = board.submit(GPU, Touch(reads=("a",), writes=("b",)), (), urgent=False)
    board.start(first, 0.0)
    assert board.finish(first, 1.0) == [last]


def test_long_chains_of_cancelled_ops_are_followed():
    """Cancelled newest first, each has the one before it as predecessor: deeper than any recursion may go."""
    machine = shuffled(0, eager=0.0)
    first = machine.submit(H2D, Touch(writes=("a", "b")))
    chain = [machine.submit(H2D, Touch(writes=("a", "b"))) for _ in range(3000)]
    assert all(machine.cancel(ticket) for ticket in reversed(chain))
    last = machine.submit(GPU, Touch(reads=("a", "b")))
    assert last.unmet == {first}
    machine.drain()


def test_ladders_of_cancelled_ops_are_followed_in_linear_time():
    """Each rung has two predecessors, so that the number of paths doubles with every rung."""
    machine = shuffled(0, eager=0.0)
    first = machine.submit(H2D, Touch(writes=("a", "b")))
    ladder = []
    for _ in range(60):
        ladder += [machine.submit(H2D, Touch(reads=("b",), writes=("a",))), machine.submit(H2D, Touch(reads=("a",)))]
        ladder.append(machine.submit(H2D, Touch(reads=("a",), writes=("b",))))
    assert all(machine.cancel(ticket) for ticket in reversed(ladder))
    assert machine.submit(GPU, Touch(writes=("a", "b"))).unmet == {first}
    machine.drain()


def test_readers_of_a_key_that_is_never_written_are_forgotten():
    """Resident weights are read by every pass of a run."""
    board = Board()
    for _ in range(1000):
        ticket = board.submit(GPU, Touch(reads=("resident",)), (), urgent=False)
        board.lane(GPU).pop(ticket)
        board.start(ticket, 0.0)
        board.finish(ticket, 0.0)
    last = board.submit(GPU, Touch(writes=("resident",)), (), urgent=False)
    assert last.ready
    assert sum(len(touched.readers) for touched in board._hazards.keys.values()) == 0


@pytest.mark.parametrize("num_pending", [10, 200])
def test_a_writer_follows_all_pending_readers(num_pending):
    """Sifting a long list of readers keeps those that have not run, and what cancelled ones passed on."""
    board = Board()
    readers = [board.submit(GPU, Touch(reads=("k",)), (), urgent=False) for _ in range(num_pending)]
    cancelled = board.submit(CPU, Touch(reads=("k",)), (readers[3],), urgent=False)
    assert board.cancel(cancelled)
    readers += [board.submit(GPU, Touch(reads=("k",)), (), urgent=False) for _ in range(num_pending)]
    assert board.submit(GPU, Touch(writes=("k",)), (), urgent=False).unmet == set(readers)
