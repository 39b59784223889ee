"""Paged KV cache in host memory: block bookkeeping (torch-free) and the buffers behind it.

The layout of one layer is [block, kv_head, block_size, head_dim] for keys and the same for values: a block holds
`block_size` tokens of every KV head, and a block number means the same place in every layer.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from harness.machine.base import CPU, Machine
from harness.memory.ops import PoisonBlocks
from harness.memory.tiers import Buffer

if TYPE_CHECKING:
    from harness.engine.sequences import Sequence
    from harness.model.spec import ModelSpec


class BlockAllocator:
    """A free list of `num_blocks` blocks, and who holds the others."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks - 1, -1, -1))
        self._holders: dict[int, Sequence] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def missing_blocks(self, sequence: Sequence, num_tokens: int) -> int:
        """How many blocks the sequence lacks to hold `num_tokens`."""
        return max(0, self.blocks_for(num_tokens) - len(sequence.blocks))

    def grow(self, sequence: Sequence, num_tokens: int) -> None:
        """Give the sequence the blocks it lacks for `num_tokens`; the caller has checked that they are free."""
        missing = self.missing_blocks(sequence, num_tokens)
        assert missing <= self.num_free, f"{missing} blocks asked, {self.num_free} free"
        for _ in range(missing):
            block = self._free.pop()
            self._holders[block] = sequence
            sequence.blocks.append(block)

    def release(self, sequence: Sequence) -> list[int]:
        """Take all blocks back; every op that touches them must have finished. The blocks that were released."""
        released = sequence.blocks[:]
        for block in released:
            holder = self._holders.pop(block)
            assert holder is sequence, f"block {block} belongs to another sequence"
            self._free.append(block)
        sequence.blocks.clear()
        sequence.num_cached = 0
        return released

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Every block is free or held by exactly the sequence that lists it; every cached token has a place."""
        sequences = list(sequences)
        free, tables = set(self._free), [(block, s) for s in sequences for block in s.blocks]
        assert len(self._free) == len(free), "a block is twice in the free list"
        assert free.isdisjoint(self._holders), "a held block is in the free list"
        assert free | self._holders.keys() == set(range(self.num_blocks)), "blocks were lost"
        assert len(tables) == len({block for block, _ in tables}), "a block is twice in the tables"
        assert {block for block, _ in tables} == self._holders.keys(), "held blocks and block tables differ"
        assert all(self._holders[block] is s for block, s in tables), "a block is in the wrong table"
        assert all(s.num_cached <= len(s.blocks) * self.block_size for s in sequences), "cached tokens without a block"


class KVCache:
    """Blocks with memory behind them: one key and one value buffer a layer, in tier `tier`."""

    def __init__(
        self, machine: Machine, spec: ModelSpec, *, capacity_bytes: int, block_size: int = 16, tier: str = "pinned"
    ) -> None:
        block_bytes = block_size * spec.kv_bytes_per_token
        self.allocator = BlockAllocator(capacity_bytes // block_bytes, block_size)
        self.shape = (self.allocator.num_blocks, spec.num_kv_heads, block_size, spec.head_dim)
        self.dtype = spec.dtype
        self._machine = machine
        layer_bytes = self.allocator.num_blocks * block_bytes // spec.num_layers // 2
        root = machine.tiers[tier].reserve("kv cache", 2 * layer_bytes * spec.num_layers)
        self.keys: list[Buffer] = []
        self.values: list[Buffer] = []
        for layer in range(spec.num_layers):
            self.keys.append(root.sub(f"keys {layer}", 2 * layer * layer_bytes, layer_bytes))
            self.values.append(root.sub(f"values {layer}", (2 * layer + 1) * layer_bytes, layer_bytes))

    def region(self, layer: int, partition: int) -> tuple[str, int, int]:
        """The dependency key of one layer's cache of the sequences in `partition`."""
        return ("kv", layer, partition)

    def release(self, sequence: Sequence) -> None:
        """Free a sequence's blocks. Retirement has waited for every op that touched them."""
        blocks = self.allocator.release(sequence)
        if self._machine.poisons and blocks:
            for layer in range(len(self.keys)):
                poison = PoisonBlocks(self, layer, sequence.partition, tuple(blocks))
                self._machine.wait(self._machine.submit(CPU, poison))  # before another partition takes the blocks
