"""Readiness where lanes are streams: an op may be launched before what it depends on has ended. Not thread-safe."""

from __future__ import annotations

from collections.abc import Iterable

from harness.machine.base import Lane, LaneKind, Op, Ticket, TicketState
from harness.machine.queues import Board

DEVICE_LANES = (LaneKind.GPU, LaneKind.H2D, LaneKind.D2H)
_PENDING, _DONE, _ISSUED = TicketState.PENDING, TicketState.DONE, TicketState.ISSUED


def joined_by_stream(first: Lane, second: Lane) -> bool:
    """Tell whether an op on `second` may be launched when the op on `first` that it follows stands in a stream.

    Its own stream then waits for the other's event. One of them must be the gpu lane. Copies follow each other through
    the host: their ops may also touch host memory when they are launched (gathering rows, filling staging memory),
    which a stream's wait would not hold back.
    """
    kinds = (first.kind, second.kind)
    return LaneKind.GPU in kinds and all(kind in DEVICE_LANES for kind in kinds)


class IssueBoard(Board):
    """A dependency between lanes that streams join is met when the earlier op is issued, any other when it is done.

    A ready ticket of a device lane keeps `waits_for`, whose unfinished members its stream must wait for; whoever
    launches it clears that.
    """

    def submit(self, lane: Lane, op: Op, after: Iterable[Ticket], urgent: bool) -> Ticket:
        ticket = super().submit(lane, op, after, urgent)
        for dependency in ticket.waits_for:
            if dependency.state is _ISSUED and joined_by_stream(dependency.lane, lane):
                ticket.num_unmet -= 1
        return ticket

    def issue(self, ticket: Ticket) -> list[Ticket]:
        """Note that the last of the ticket's packets stands in a stream, and return the dependents that became ready by
        it."""
        ticket.state = _ISSUED
        return [d for d in ticket.dependents or () if joined_by_stream(ticket.lane, d.lane) and self._met(d)]

    def _settle(self, ticket: Ticket) -> list[Ticket]:
        ticket.state = _DONE
        dependents, ticket.dependents = ticket.dependents or (), None
        return [d for d in dependents if not joined_by_stream(ticket.lane, d.lane) and self._met(d)]

    @staticmethod
    def _met(dependent: Ticket) -> bool:
        """Note that one more dependency of `dependent` is met, and tell whether it is ready by that."""
        dependent.num_unmet -= 1
        if dependent.num_unmet:
            return False
        if dependent.lane.kind not in DEVICE_LANES:
            dependent.waits_for = ()
        return dependent.state is _PENDING
