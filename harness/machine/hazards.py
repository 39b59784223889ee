"""Derives read-after-write, write-after-read and write-after-write dependencies from what ops declare."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator

from harness.machine.base import Ticket, TicketState

_PRUNE_READERS_ABOVE = 16


class Hazards:
    """Last writer and readers since, by key. Program order is submission order."""

    def __init__(self) -> None:
        self._writer: dict[Hashable, Ticket] = {}
        self._readers: dict[Hashable, list[Ticket]] = {}

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
        for key in op.reads:
            if key not in op.writes:
                self._add_reader(key, ticket)

    def _add_reader(self, key: Hashable, ticket: Ticket) -> None:
        readers = self._readers.setdefault(key, [])
        if len(readers) >= _PRUNE_READERS_ABOVE:
            readers[:] = [r for r in self._effective(readers) if not r.settled]
        readers.append(ticket)

    def _effective(self, tickets: Iterable[Ticket]) -> Iterator[Ticket]:
        """A cancelled op did nothing, so whoever would follow it follows what it would have followed."""
        for ticket in tickets:
            if ticket.state is TicketState.CANCELLED:
                yield from self._effective(ticket.inherited)
            else:
                yield ticket
