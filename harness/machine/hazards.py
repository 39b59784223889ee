"""Derives read-after-write, write-after-read and write-after-write dependencies from what ops declare."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from functools import cache

from harness.machine.base import Lane, Op, Ticket, TicketState
from harness.machine.overlaps import Overlaps, buffer_of
from harness.memory.tiers import Buffer
from kernels.dependencies import NativeDependencies, dependencies

_SIFT_READERS_FROM = 16
_SWEEP_KEYS_FROM = 1 << 14  # more than most models have experts: a key that comes again costs more than one that stays
_DONE, _CANCELLED = TicketState.DONE, TicketState.CANCELLED


class _Touched:
    """The ops that touched a key: its last writer, if that may still matter, and the readers since."""

    __slots__ = ("overlapping", "readers", "sift_at", "writer")

    def __init__(self) -> None:
        self.writer: Ticket | None = None
        self.readers: list[Ticket] = []
        self.overlapping: list[_Touched] = []  # of other buffers' keys that share bytes with this one
        self.sift_at = _SIFT_READERS_FROM  # length at which the readers are searched for settled ones next


@cache
def _native() -> NativeDependencies:
    blank = Ticket(None, None, -1, False)  # type: ignore[arg-type]
    return dependencies(blank=blank, touched=_Touched, done=_DONE, cancelled=_CANCELLED, sift_from=_SIFT_READERS_FROM)


class Hazards:
    """Remembers the last writer of each key and the readers since. Program order is submission order.

    Keys of one buffer are different memory where they are not equal. Keys of two buffers are the same memory as far as
    their bytes are. So a root may be cut again, for another pass or as pages, without waiting until nothing uses the
    old cut, on no GPU. Memory that is handed on cannot be written by its holder before, unless an op does not declare
    what it touches; and nothing waits that would not have to.

    A ticket carries the number of the submission that looked at it last (`stamp`): so a ticket that is met under
    several keys counts once, without a set for every op. What every submission does is written in C++
    (`kernels/csrc/core/dependencies.h`); it calls `_add_key` and `_unsettled` for what few need.
    """

    def __init__(self) -> None:
        self.native = _native()
        self.keys: dict[Hashable, _Touched] = {}
        self.num_dropped = 0  # of them: until it changes, what was found by a key stays
        self._by_buffer: dict[Buffer, dict[Hashable, None]] = {}  # its keys, in order
        self._overlaps = Overlaps()
        self._sweep_at = _SWEEP_KEYS_FROM

    def register(self, ticket: Ticket, after: Iterable[Ticket] = ()) -> None:
        """Tie `ticket` to everything unfinished that must come first, and record what it touches."""
        self.native.tie(self, self.keys, ticket, after)

    def record(
        self, lane: Lane, op: Op, number: int, *, urgent: bool, after: Iterable[Ticket], before: Sequence[int]
    ) -> tuple[Ticket, tuple[int, ...]]:
        """Return the ticket of an op that counts as over, and the numbers of the ops that come before it.

        These are those that it follows, and of those given as `before` all that are not below 0.
        """
        found: tuple[Ticket, tuple[int, ...]] = self.native.record(
            self, self.keys, op, lane, number, urgent, after, before
        )
        return found

    def forget(self) -> None:
        """Let go of all tickets: nothing that was registered matters any more."""
        for touched in self.keys.values():
            touched.overlapping.clear()  # they refer to each other
        self.num_dropped += len(self.keys)
        self.keys.clear()
        self._by_buffer.clear()
        self._overlaps = Overlaps()

    def _unsettled(self, found: Iterable[Ticket]) -> list[Ticket]:
        """Return those that are not done, with what a cancelled one followed in its place."""
        return [each for each in self._effective(found) if each.state is not _DONE]

    def _add_key(self, key: Hashable) -> _Touched:
        """Add a key, and drop keys that nobody will name again, which must not stay for ever."""
        if len(self.keys) >= self._sweep_at:
            for old in [k for k, t in self.keys.items() if not self._matters(t)]:
                self._drop(old)
            self._sweep_at = max(_SWEEP_KEYS_FROM, 2 * len(self.keys))
        touched = self.keys[key] = _Touched()
        if (buffer := buffer_of(key)) is not None:
            self._add_memory(key, buffer, touched)
        return touched

    def _add_memory(self, key: Hashable, buffer: Buffer, touched: _Touched) -> None:
        """Tie the key to those of other buffers that share bytes with it, where these still matter."""
        if buffer in self._by_buffer:
            self._by_buffer[buffer][key] = None
            others = self._overlaps.of(buffer)
        else:
            self._by_buffer[buffer] = {key: None}
            others = self._overlaps.add(buffer)
        if not others:
            return
        for old in [k for other in others for k in self._by_buffer[other]]:
            if self._matters(self.keys[old]):
                touched.overlapping.append(self.keys[old])
                self.keys[old].overlapping.append(touched)
            else:
                self._drop(old)

    def _drop(self, key: Hashable) -> None:
        touched = self.keys.pop(key)
        self.num_dropped += 1
        for other in touched.overlapping:
            other.overlapping.remove(touched)
        if (buffer := buffer_of(key)) is not None:
            del self._by_buffer[buffer][key]
            if not self._by_buffer[buffer]:
                del self._by_buffer[buffer]
                self._overlaps.remove(buffer)

    def _matters(self, touched: _Touched) -> bool:
        writers = () if touched.writer is None else (touched.writer,)
        return any(t.state is not _DONE for t in self._effective((*writers, *touched.readers)))

    @staticmethod
    def _effective(tickets: Iterable[Ticket]) -> Iterator[Ticket]:
        """Yield each op once, with what a cancelled op followed in its place: a cancelled op did nothing."""
        found, open_ = set(), list(tickets)
        while open_:
            ticket = open_.pop()
            if ticket in found:
                continue
            found.add(ticket)
            if ticket.state is _CANCELLED:
                open_.extend(ticket.inherited)
            else:
                yield ticket
