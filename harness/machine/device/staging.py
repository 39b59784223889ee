"""Hold pinned memory through which pageable and scattered data pass on their way to or from the device."""

from __future__ import annotations

from collections import deque

import torch

_ALIGNMENT_BYTES = 256


class Slot:
    """A piece of a ring; `end` is the place behind it, counted over all turns of the ring."""

    __slots__ = ("end", "memory")

    def __init__(self, memory: torch.Tensor, end: int) -> None:
        self.memory = memory
        self.end = end


class StagingRing:
    """Slots in turn from one piece of pinned memory, given back in the order in which they were taken: that of a
    stream. One thread takes, another gives back; a lock of the machine's guards both."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory  # uint8 [capacity]
        self._head = 0  # next free place, counted over all turns
        self._tail = 0  # where the oldest slot in use begins
        self._taken: deque[Slot] = deque()

    @property
    def capacity_bytes(self) -> int:
        return self.memory.numel()

    @property
    def empty(self) -> bool:
        return not self._taken

    def take(self, nbytes: int) -> Slot | None:
        """Take uint8 memory of that size, or return None while there is no room."""
        size = -(-max(nbytes, 1) // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        if not self._taken:
            self._head = self._tail = 0
        start = self._head % self.capacity_bytes
        skipped = self.capacity_bytes - start if start + size > self.capacity_bytes else 0
        end = self._head + skipped + size
        if end - self._tail > self.capacity_bytes:
            return None
        start = (self._head + skipped) % self.capacity_bytes
        self._head = end
        slot = Slot(self.memory[start : start + nbytes], end)
        self._taken.append(slot)
        return slot

    def give_back(self, slot: Slot) -> None:
        assert self._taken and self._taken[0] is slot, "slots come back in the order in which they were taken"
        self._taken.popleft()
        self._tail = slot.end
