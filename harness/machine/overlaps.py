"""Finds which of the buffers in use share bytes with another one."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Hashable
from dataclasses import dataclass, field

from harness.memory.tiers import Buffer


def buffer_of(key: Hashable) -> Buffer | None:
    """Return the buffer that a dependency key names: the key itself, or the first item of a tuple that names part of
    one."""
    first = key[0] if isinstance(key, tuple) and key else key
    return first if isinstance(first, Buffer) else None


@dataclass(eq=False, slots=True)
class _Known:
    """The known buffers of a root, in the order of their first bytes."""

    starts: list[int] = field(default_factory=list)  # their first bytes
    buffers: list[Buffer] = field(default_factory=list)
    largest_bytes: int = 0  # of the buffers so far: how far ahead one can begin
    are_apart: bool = True  # no two have shared a byte so far: only the one before another can reach into it

    def leaves_room(self, at: int, buffer: Buffer) -> bool:
        """Tell whether the buffer has bytes and shares none with its neighbours at the place `at`, where it belongs."""
        before = self.buffers[at - 1] if at else None
        return (
            buffer.nbytes > 0
            and (before is None or before.offset_bytes + before.nbytes <= buffer.offset_bytes)
            and (at == len(self.starts) or buffer.offset_bytes + buffer.nbytes <= self.starts[at])
        )


class Overlaps:
    """The known buffers by root, and which of them share bytes."""

    def __init__(self) -> None:
        self._by_root: dict[Buffer, _Known] = {}

    def add(self, buffer: Buffer) -> list[Buffer]:
        """Take note of a buffer that is not known yet, and return the known ones that share a byte with it."""
        if (known := self._by_root.get(buffer.root)) is None:
            known = self._by_root[buffer.root] = _Known()
        found, at = [], bisect_right(known.starts, buffer.offset_bytes)
        if not (known.are_apart and known.leaves_room(at, buffer)):
            found = self.of(buffer)
            known.are_apart = known.are_apart and not found and buffer.nbytes > 0
        known.largest_bytes = max(known.largest_bytes, buffer.nbytes)
        known.starts.insert(at, buffer.offset_bytes)
        known.buffers.insert(at, buffer)
        return found

    def remove(self, buffer: Buffer) -> None:
        """Forget a known buffer."""
        known = self._by_root[buffer.root]
        at = known.buffers.index(buffer, bisect_left(known.starts, buffer.offset_bytes))
        del known.starts[at], known.buffers[at]
        if not known.buffers:
            del self._by_root[buffer.root]

    def of(self, buffer: Buffer) -> list[Buffer]:
        """Return all other known buffers that share a byte with this one."""
        if (known := self._by_root.get(buffer.root)) is None:
            return []
        starts, begin, end = known.starts, buffer.offset_bytes, buffer.offset_bytes + buffer.nbytes
        if known.are_apart:
            first = max(0, bisect_left(starts, begin) - 1)
        else:
            first = bisect_left(starts, begin - known.largest_bytes)
        found = known.buffers[first : bisect_left(starts, end, first)]
        return [b for b in found if b is not buffer and b.offset_bytes + b.nbytes > begin]
