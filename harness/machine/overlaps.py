"""Finds which of the buffers in use share bytes with another one."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable

from harness.memory.tiers import Buffer


def buffer_of(key: Hashable) -> Buffer | None:
    """Return the buffer that a dependency key names: the key itself, or the first item of a tuple that names part of
    one."""
    first = key[0] if isinstance(key, tuple) and key else key
    return first if isinstance(first, Buffer) else None


class Overlaps:
    """The known buffers by root, in the order of their first bytes."""

    def __init__(self) -> None:
        self._by_root: dict[Buffer, list[Buffer]] = {}
        self._largest_bytes: dict[Buffer, int] = {}  # of a root's buffers, so far: how far ahead one can begin

    def add(self, buffer: Buffer) -> None:
        """Take note of a buffer that is not known yet."""
        root = buffer.root
        insort(self._by_root.setdefault(root, []), buffer, key=_first_byte)
        self._largest_bytes[root] = max(self._largest_bytes.get(root, 0), buffer.nbytes)

    def remove(self, buffer: Buffer) -> None:
        """Forget a known buffer."""
        root = buffer.root
        known = self._by_root[root]
        del known[known.index(buffer, bisect_left(known, buffer.offset_bytes, key=_first_byte))]
        if not known:
            del self._by_root[root], self._largest_bytes[root]

    def of(self, buffer: Buffer) -> list[Buffer]:
        """Return all other known buffers that share a byte with this one."""
        known = self._by_root.get(buffer.root, [])
        if len(known) < 2:
            return [other for other in known if other is not buffer]
        begin, end = buffer.offset_bytes, buffer.offset_bytes + buffer.nbytes
        first = bisect_left(known, begin - self._largest_bytes[buffer.root], key=_first_byte)
        behind = bisect_left(known, end, key=_first_byte)
        return [b for b in known[first:behind] if b is not buffer and b.offset_bytes + b.nbytes > begin]


def _first_byte(buffer: Buffer) -> int:
    return buffer.offset_bytes
