"""The two FIFO classes of a lane, and the step from 'pending' to 'ready'. Shared by all machines; not thread-safe."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from harness.machine.base import Lane, Op, Ticket, TicketState
from harness.machine.hazards import Hazards

_PENDING, _CANCELLED = TicketState.PENDING, TicketState.CANCELLED


class LaneQueue:
    """The head of the normal class blocks its class until it is ready; a ready urgent head goes first."""

    __slots__ = ("normal", "urgent")

    def __init__(self) -> None:
        self.normal: deque[Ticket] = deque()
        self.urgent: deque[Ticket] = deque()

    def push(self, ticket: Ticket) -> None:
        queue = self.urgent if ticket.urgent else self.normal
        while queue and queue[0].settled:
            queue.popleft()
        queue.append(ticket)

    def ready_urgent(self) -> Ticket | None:
        self._drop_cancelled(self.urgent)
        return self.urgent[0] if self.urgent and self.urgent[0].ready else None

    def ready_normal(self) -> Ticket | None:
        self._drop_cancelled(self.normal)
        return self.normal[0] if self.normal and self.normal[0].ready else None

    def ready(self) -> Ticket | None:
        """Return the op this lane would start now, if any."""
        return self.ready_urgent() or self.ready_normal()

    def pop(self, ticket: Ticket) -> None:
        queue = self.urgent if ticket.urgent else self.normal
        assert queue[0] is ticket, f"{ticket} is not at the head of its lane"
        queue.popleft()

    def pending(self) -> list[Ticket]:
        return [t for t in (*self.urgent, *self.normal) if t.state is _PENDING]

    @staticmethod
    def _drop_cancelled(queue: deque[Ticket]) -> None:
        while queue and queue[0].state is _CANCELLED:
            queue.popleft()


class Board:
    """All tickets of a machine whose lanes are run by real threads or at random: numbering, dependencies, lanes."""

    def __init__(self) -> None:
        self.lanes: dict[Lane, LaneQueue] = {}
        self.running: set[Ticket] = set()
        self.num_submitted = 0
        self.num_settled = 0
        self._hazards = Hazards()
        self._events: list[tuple[Ticket, float, bool]] = []  # (ticket, time, finished) not yet shown to the strategy

    def submit(self, lane: Lane, op: Op, after: Iterable[Ticket], urgent: bool) -> Ticket:
        assert op.packets >= 1, f"{op} has no packets"
        ticket = Ticket(op, lane, self.num_submitted, urgent)
        self.num_submitted += 1
        self._hazards.register(ticket, after)
        self.lane(lane).push(ticket)
        return ticket

    def lane(self, lane: Lane) -> LaneQueue:
        queue = self.lanes.get(lane)
        if queue is None:
            queue = self.lanes[lane] = LaneQueue()
        return queue

    def start(self, ticket: Ticket, time_s: float) -> None:
        ticket.state = TicketState.RUNNING
        self.running.add(ticket)
        self._events.append((ticket, time_s, False))

    def restart(self, ticket: Ticket, time_s: float) -> None:
        """Note that the ticket's op began at another time than was thought when it was started."""
        self._events.append((ticket, time_s, False))

    def finish(self, ticket: Ticket, time_s: float) -> list[Ticket]:
        """Settle the ticket; the dependents that became ready by it."""
        self.running.discard(ticket)
        self.num_settled += 1
        self._events.append((ticket, time_s, True))
        return self._settle(ticket)

    def _settle(self, ticket: Ticket) -> list[Ticket]:
        return settle(ticket)

    def cancel(self, ticket: Ticket) -> bool:
        withdrawn = withdraw(ticket)
        self.num_settled += withdrawn
        return withdrawn

    def show_events(self) -> None:
        """Bring the tickets' public fields up to date: what `wait`, `wait_any` and `now` do, and nothing else."""
        for ticket, time_s, finished in self._events:
            if finished:
                ticket.finished_s, ticket.done = time_s, True
            else:
                ticket.started_s = time_s
        self._events.clear()

    def dump(self) -> str:
        running = sorted(self.running, key=lambda t: t.number)
        lanes = sorted(self.lanes.items())
        return dump((lane, queue.pending(), [t for t in running if t.lane == lane]) for lane, queue in lanes)


def settle(ticket: Ticket) -> list[Ticket]:
    """Note that the ticket's op has run, and return the dependents that became ready by it."""
    ticket.state = TicketState.DONE
    freed = []
    for dependent in ticket.dependents or ():
        dependent.num_unmet -= 1
        if not dependent.num_unmet:
            dependent.waits_for = ()
            if dependent.state is _PENDING:
                freed.append(dependent)
    ticket.dependents = None
    return freed


def withdraw(ticket: Ticket) -> bool:
    """Cancel the ticket if it has not started and nothing depends on it. It stays in its lane's queue."""
    if ticket.state is not _PENDING or ticket.dependents:
        return False
    ticket.state = _CANCELLED
    ticket.inherited = tuple(d for d in ticket.waits_for if not d.settled)
    for dependency in ticket.inherited:
        assert dependency.dependents is not None, "whoever is waited for knows it"
        dependency.dependents.remove(ticket)
    ticket.waits_for = ()
    ticket.num_unmet = 0
    return True


def dump(lanes: Iterable[tuple[Lane, Sequence[Ticket], Sequence[Ticket]]]) -> str:
    """List lanes with pending ops and what these wait for, and with running ops: the text of a watchdog's report."""
    lines = []
    for lane, pending, running in lanes:
        lines.append(f"  lane {lane}: {len(pending)} pending")
        for ticket in running:
            lines.append(f"    {ticket} runs, {ticket.packets_run} of {ticket.op.packets} packets done")
        for ticket in pending[:5]:
            waits = ", ".join(str(t) for t in sorted(ticket.unmet, key=lambda t: t.number)[:4]) or "its turn"
            lines.append(f"    {ticket} waits for {waits}")
    return "\n".join(lines)
