"""Derives read-after-write, write-after-read and write-after-write dependencies from what ops declare."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Iterator

from harness.machine.base import Ticket, TicketState

_SIFT_READERS_FROM = 16


class Hazards:
    """Last writer and readers since, by key. Program order is submission order."""

    def __init__(self) -> None:
        self._writer: dict[Hashable, Ticket] = {}
        self._readers: dict[Hashable, deque[Ticket]] = {}
        self._sift_at: dict[Hashable, int] = {}  # length at which a key's readers are searched for settled ones next

    def register(self, ticket: Ticket, after: Iterable[Ticket] = ()) -> None:
        """Fill `ticket.unmet` with everything unfinished that must come first, and record what it touches."""
        op, first = ticket.op, set(after)
        for key in op.reads:
            if (writer := self._writer.get(key)) is not None:
                first.add(writer)
        for key in op.writes:
            if (writer := self._writer.get(key)) is not None:
                first.add(writer)
            first.update(self._readers.get(key, ()))
        for dependency in self._effective(first):
            if dependency is not ticket and not dependency.settled:
                ticket.unmet.add(dependency)
                dependency.dependents.append(ticket)
        for key in op.writes:
            self._writer[key] = ticket
            self._readers.pop(key, None)
            self._sift_at.pop(key, None)
        for key in op.reads:
            if key not in op.writes:
                self._add_reader(key, ticket)

    def _add_reader(self, key: Hashable, ticket: Ticket) -> None:
        """Keys that are never written, such as resident weights, must not keep all their readers alive."""
        readers = self._readers.setdefault(key, deque())
        while readers and readers[0].state is TicketState.DONE:
            readers.popleft()
        if len(readers) >= self._sift_at.get(key, _SIFT_READERS_FROM):
            readers = deque(r for r in self._effective(readers) if not r.settled)
            self._readers[key], self._sift_at[key] = readers, max(_SIFT_READERS_FROM, 2 * len(readers))
        readers.append(ticket)

    @staticmethod
    def _effective(tickets: Iterable[Ticket]) -> Iterator[Ticket]:
        """A cancelled op did nothing, so whoever would follow it follows what it would have followed. Each once."""
        found, open_ = set(), list(tickets)
        while open_:
            ticket = open_.pop()
            if ticket in found:
                continue
            found.add(ticket)
            if ticket.state is TicketState.CANCELLED:
                open_.extend(ticket.inherited)
            else:
                yield ticket
