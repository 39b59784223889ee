"""What a long run must not do: keep what is over, or slow down."""

from __future__ import annotations

import gc

from harness.machine.base import CPU, D2H, GPU, H2D, Ticket
from harness.machine.queues import Board
from tests.unit.machine.ops import Quick

LANES = (GPU, CPU, H2D, D2H)


def live_tickets() -> int:
    gc.collect()
    return sum(type(thing) is Ticket for thing in gc.get_objects())


def test_tickets_of_finished_ops_are_forgotten(machine):
    """Readers of weights that are never written, a chain of writers, cancelled ops: none may keep its past alive."""
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
