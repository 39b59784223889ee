"""Keep the blocks of a KV cache in several memories: a share on the device, or each GPU's sequences in its own memory.
Torch-free bookkeeping over ordinary caches."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from harness.memory.kv_cache import BlockAllocator, KVCache

if TYPE_CHECKING:
    from harness.engine.sequences import Sequence


class SplitAllocator:
    """Hands out the blocks of several memories, its sides, as one allocator. A sequence has all of its blocks on one
    side. It takes the first ones on a device where there are enough of them, otherwise on the host. Of several devices
    it is the one that is filled least, so that sequences admitted together are on all of them in the proportion of
    their sizes."""

    def __init__(self, *sides: BlockAllocator) -> None:
        assert len({(side.on_device, side.rank) for side in sides}) == len(sides), "one side each"
        assert len({side.block_size for side in sides}) == 1, "blocks hold the same number of tokens"
        self._sides = sides
        self.block_size = sides[0].block_size

    @property
    def num_blocks(self) -> int:
        return sum(side.num_blocks for side in self._sides)

    @property
    def num_free(self) -> int:
        return sum(side.num_free for side in self._sides)

    @property
    def num_used(self) -> int:
        return sum(side.num_used for side in self._sides)

    @property
    def max_sequence_blocks(self) -> int:
        return max(side.num_blocks for side in self._sides)

    def free_for(self, sequence: Sequence) -> int:
        return max(side.num_free for side in self._open_to(sequence))

    def blocks_for(self, num_tokens: int) -> int:
        return self._sides[0].blocks_for(num_tokens)

    def missing_blocks(self, sequence: Sequence, num_tokens: int) -> int:
        return self._sides[0].missing_blocks(sequence, num_tokens)

    def grow(self, sequence: Sequence, num_tokens: int) -> None:
        missing = self.missing_blocks(sequence, num_tokens)
        fitting = [side for side in self._open_to(sequence) if missing <= side.num_free]
        assert fitting, f"{missing} blocks asked, {self.free_for(sequence)} free on one side"
        fitting[0].grow(sequence, num_tokens)

    def release(self, sequence: Sequence) -> list[int]:
        return self._side_of(sequence).release(sequence)

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        sequences = list(sequences)
        for side in self._sides:
            side.check_integrity([s for s in sequences if not s.blocks or side.is_home_of(s)])

    def _open_to(self, sequence: Sequence) -> list[BlockAllocator]:
        """Return the sides on which the sequence may take blocks: devices first, and among them the least filled
        first."""
        if sequence.blocks:
            return [self._side_of(sequence)]
        return sorted(self._sides, key=lambda side: (not side.on_device, side.num_used / max(1, side.num_blocks)))

    def _side_of(self, sequence: Sequence) -> BlockAllocator:
        return next(side for side in self._sides if side.is_home_of(sequence))


class SplitKVCache:
    """Keeps a share of the blocks in device memory and the others in host memory (MoE-Lightning's and FlexGen's r_c).
    Where GPUs serve different sequences, it keeps the blocks of each GPU in that GPU's memory."""

    def __init__(self, *parts: KVCache) -> None:
        self._parts = parts
        self.device = next((part for part in parts if part.on_device), None)
        self.host = next((part for part in parts if not part.on_device), None)
        self.allocator = SplitAllocator(*(part.allocator for part in parts))

    @property
    def num_device_blocks(self) -> int:
        return max(part.num_device_blocks for part in self._parts)

    def release(self, sequence: Sequence) -> None:
        next(part for part in self._parts if part.allocator.is_home_of(sequence)).release(sequence)

    def close(self) -> None:
        for part in self._parts:
            part.close()
