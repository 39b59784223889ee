"""A KV cache of which a share lies in device memory. Torch-free bookkeeping over two ordinary caches."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from harness.memory.kv_cache import BlockAllocator, KVCache

if TYPE_CHECKING:
    from harness.engine.sequences import Sequence


class SplitAllocator:
    """Device blocks and host blocks behind one face. A sequence has all of its blocks on one side: when it takes its
    first ones, on the side that is filled less, so that sequences admitted together are on both sides in the
    proportion of the sides' sizes; where that side has too few, on the other."""

    def __init__(self, device: BlockAllocator, host: BlockAllocator) -> None:
        assert device.on_device and not host.on_device, "one side each"
        assert device.block_size == host.block_size, "blocks hold the same number of tokens"
        self._sides = (device, host)
        self.block_size = host.block_size

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
            side.check_integrity([s for s in sequences if not s.blocks or s.kv_on_device is side.on_device])

    def _open_to(self, sequence: Sequence) -> list[BlockAllocator]:
        """Where it may take blocks, the side filled less first."""
        if sequence.blocks:
            return [self._side_of(sequence)]
        return sorted(self._sides, key=lambda side: side.num_used / max(1, side.num_blocks))

    def _side_of(self, sequence: Sequence) -> BlockAllocator:
        return self._sides[0] if sequence.kv_on_device else self._sides[1]


class SplitKVCache:
    """A share of the blocks in device memory, the others in host memory (MoE-Lightning's and FlexGen's r_c)."""

    def __init__(self, device: KVCache, host: KVCache) -> None:
        self.device, self.host = device, host
        self.allocator = SplitAllocator(device.allocator, host.allocator)

    @property
    def num_device_blocks(self) -> int:
        return self.device.num_device_blocks

    def release(self, sequence: Sequence) -> None:
        (self.device if sequence.kv_on_device else self.host).release(sequence)

    def close(self) -> None:
        self.device.close()
        self.host.close()
