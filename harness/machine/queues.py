"""The two FIFO classes of a lane, and the step from 'pending' to 'ready'. Shared by all machines; not thread-safe."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from harness.machine.base import Lane, Op, Ticket, TicketState
from harness.machine.hazards import Hazards


class LaneQueue:
    """The head of the normal class blocks its class until it is ready; a ready urgent head goes first."""

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
        """The op this lane would start now, if any."""
        return self.ready_urgent() or self.ready_normal()

    def pop(self, ticket: Ticket) -> None:
        queue = self.urgent if ticket.urgent else self.normal
        assert queue[0] is ticket, f"{ticket} is not at the head of its lane"
        queue.popleft()

    def pending(self) -> list[Ticket]:
        return [t for t in (*self.urgent, *self.normal) if t.state is TicketState.PENDING]

    @staticmethod
    def _drop_cancelled(queue: deque[Ticket]) -> None:
        while queue and queue[0].state is TicketState.CANCELLED:
            queue.popleft()


class Board:
    """All tickets of a machine: numbering, dependencies, lanes."""

    def __init__(self) -> None:
        self.lanes: dict[Lane, LaneQueue] = {}
        self.running: set[Ticket] = set()
        self.num_submitted = 0
        self.num_settled = 0
        self._hazards = Hazards()
        self._events: list[tuple[Ticket, float, bool]] = []  # (ticket, time, finished) not yet shown to the strategy

    def submit(self, lane: Lane, op: Op, after: Iterable[Ticket], urgent: bool) -> Ticket:
        assert op.packets >= 1, f"{op} has no packets"
        ticket = Ticket(op=op, lane=lane, number=self.num_submitted, urgent=urgent)
        self.num_submitted += 1
        self._hazards.register(ticket, after)
        self.lane(lane).push(ticket)
        return ticket

    def lane(self, lane: Lane) -> LaneQueue:
        return self.lanes.setdefault(lane, LaneQueue())

    def start(self, ticket: Ticket, time_s: float) -> None:
        ticket.state = TicketState.RUNNING
        self.running.add(ticket)
        self._events.append((ticket, time_s, False))

    def finish(self, ticket: Ticket, time_s: float) -> list[Ticket]:
        """Settle the ticket; the dependents that became ready by it."""
        ticket.state = TicketState.DONE
        self.running.discard(ticket)
        self.num_settled += 1
        self._events.append((ticket, time_s, True))
        freed = []
        for dependent in ticket.dependents:
            dependent.unmet.discard(ticket)
            if dependent.ready and dependent.state is TicketState.PENDING:
                freed.append(dependent)
        ticket.dependents.clear()
        return freed

    def cancel(self, ticket: Ticket) -> bool:
        depended_on = any(not d.settled for d in ticket.dependents)
        if ticket.state is not TicketState.PENDING or depended_on:
            return False
        ticket.state = TicketState.CANCELLED
        ticket.inherited = tuple(ticket.unmet)
        for dependency in ticket.unmet:
            dependency.dependents.remove(ticket)
        ticket.unmet.clear()
        self.num_settled += 1
        return True

    def show_events(self) -> None:
        """Bring the tickets' public fields up to date: what `wait`, `wait_any` and `now` do, and nothing else."""
        for ticket, time_s, finished in self._events:
            if finished:
                ticket.finished_s, ticket.done = time_s, True
            else:
                ticket.started_s = time_s
        self._events.clear()

    def dump(self) -> str:
        """Lanes with running ops, and pending ops with what they wait for: the text of a watchdog's report."""
        lines = []
        for lane, queue in sorted(self.lanes.items()):
            pending = queue.pending()
            lines.append(f"  lane {lane}: {len(pending)} pending")
            for ticket in sorted((t for t in self.running if t.lane == lane), key=lambda t: t.number):
                lines.append(f"    {ticket} runs, {ticket.packets_run} of {ticket.op.packets} packets done")
            for ticket in pending[:5]:
                waits = ", ".join(str(t) for t in sorted(ticket.unmet, key=lambda t: t.number)[:4]) or "its turn"
                lines.append(f"    {ticket} waits for {waits}")
        return "\n".join(lines)
