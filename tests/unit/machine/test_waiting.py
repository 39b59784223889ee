"""wait, wait_any, cancel and now: what they return, and what a ticket shows and when."""

from __future__ import annotations

import pytest

from harness.machine.base import CPU, D2H, GPU, H2D, MachineError
from tests.kernels.eventually import eventually
from tests.unit.machine.ops import Gated, Quick


def test_wait_returns_the_value_of_the_last_packet(machine):
    class Counting(Quick):
        def run(self, ctx, packet):
            return packet

    assert machine.wait(machine.submit(D2H, Counting(packets=3))) == 2


def test_waiting_twice_gives_the_same_value(machine):
    ticket = machine.submit(D2H, Quick(5))
    assert machine.wait(ticket) == machine.wait(ticket) == 5


def test_wait_any_gives_all_that_have_finished_in_that_order(machine):
    slow, fast = machine.submit(GPU, Quick("a")), machine.submit(CPU, Quick("b"))
    machine.drain()
    later = machine.submit(CPU, Quick("c"), after=[slow, fast])
    finished = machine.wait_any([later, fast, slow])
    assert {slow, fast} <= set(finished)
    assert [t.finished_s for t in finished] == sorted(t.finished_s for t in finished)
    machine.wait(later)
    assert machine.wait_any([later, fast, slow])[-1] is later


def test_wait_any_returns_while_others_still_run(emulated):
    machine, blocked = emulated(), Gated()
    slow = machine.submit(GPU, blocked)
    fast = machine.submit(CPU, Quick())
    assert machine.wait_any([slow, fast]) == [fast]
    blocked.open()


def test_wait_any_counts_cancelled_ops(emulated):
    machine, blocked = emulated(), Gated()
    running = machine.submit(GPU, blocked)
    waiting = machine.submit(GPU, Quick())
    assert machine.cancel(waiting)
    assert machine.wait_any([running, waiting]) == [waiting]
    blocked.open()


def test_wait_any_of_nothing_is_an_error(machine):
    with pytest.raises(AssertionError):
        machine.wait_any([])


def test_waiting_for_a_cancelled_op_is_an_error(emulated):
    machine, blocked = emulated(), Gated()
    machine.submit(GPU, blocked)
    ticket = machine.submit(GPU, Quick())
    assert machine.cancel(ticket)
    with pytest.raises(MachineError, match="quick.*cancelled"):
        machine.wait(ticket)
    blocked.open()


def test_only_what_has_not_started_and_has_no_followers_can_be_cancelled(emulated):
    machine, blocked = emulated(), Gated()
    running = machine.submit(GPU, blocked)
    writer = machine.submit(GPU, Quick(writes=("k",)))
    reader = machine.submit(CPU, Quick(reads=("k",)))
    blocked.await_packet(0)
    assert not machine.cancel(running), "it runs"
    assert not machine.cancel(writer), "the reader depends on it"
    assert machine.cancel(reader)
    assert not machine.cancel(reader), "it is cancelled already"
    assert machine.cancel(writer), "nothing depends on it any more"
    blocked.open()
    machine.wait(running)
    assert not machine.cancel(running), "it has finished"
    assert not reader.done
    assert reader.started_s is None


def test_tickets_change_only_in_wait_wait_any_and_now(machine):
    """A strategy that polls without waiting would work here and hang where time is virtual."""
    ticket = machine.submit(CPU, Quick())
    other = machine.submit(GPU, Quick())
    # The machine's own field: it has finished, but nobody was told.
    eventually(lambda: ticket.settled, meanwhile=lambda: machine.submit(H2D, Quick()))
    assert (ticket.done, ticket.started_s, ticket.finished_s) == (False, None, None)
    machine.wait(other)
    assert ticket.done
    assert ticket.started_s <= ticket.finished_s <= machine.now()


def test_now_shows_what_has_started_and_not_finished(emulated):
    machine, blocked = emulated(), Gated()
    ticket = machine.submit(GPU, blocked)
    blocked.await_packet(0)
    assert ticket.started_s is None
    now_s = machine.now()
    assert ticket.started_s is not None
    assert ticket.started_s <= now_s
    assert not ticket.done
    blocked.open()


def test_times_of_tickets_are_those_of_their_spans(emulated):
    machine = emulated()
    ticket = machine.submit(GPU, Quick(packets=3))
    machine.wait(ticket)
    assert len(machine.spans) == 3
    assert ticket.started_s == machine.spans[0].start_s
    assert ticket.finished_s == machine.spans[-1].end_s


def test_drain_waits_for_everything(machine):
    tickets = [machine.submit(lane, Quick(packets=2)) for lane in (GPU, CPU, H2D, D2H) for _ in range(5)]
    machine.drain()
    assert all(t.done for t in tickets)


def test_an_op_of_no_packets_is_refused(machine):
    with pytest.raises(AssertionError, match="no packets"):
        machine.submit(GPU, Quick(packets=0))
    assert machine.wait(machine.submit(GPU, Quick(1))) == 1
