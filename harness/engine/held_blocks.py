"""Keep in which KV blocks some sequences lie, to be put together when somebody asks. Torch-free."""

from __future__ import annotations

from functools import cached_property
from operator import attrgetter

import numpy as np

from harness.engine.sequences import Sequence
from kernels import fields


class HeldBlocks:
    """The blocks that some sequences hold now, one sequence after another.

    Until blocks are asked for, only the sequences' lists of them are kept. These grow, but never change otherwise.
    """

    def __init__(self, sequences: list[Sequence], block_size: int) -> None:
        self.sequences, self.block_size = sequences, block_size
        self.counts = fields.lengths(sequences, "blocks")
        self._lists = list(map(attrgetter("blocks"), sequences))

    def require(self, num_tokens: np.ndarray) -> None:
        """Assert that each sequence has blocks for its `num_tokens`, int64 [sequences]. Raises IndexError."""
        if (num_tokens > self.counts * self.block_size).any():
            raise IndexError("a token has no block")

    @cached_property
    def blocks(self) -> np.ndarray:
        """The numbers of all blocks, one sequence's after another's: int64."""
        return fields.joined(self._lists, self.counts)

    def slots(self, which: np.ndarray, at: np.ndarray) -> np.ndarray:
        """Return the KV slots of tokens `at` of the sequences `which`."""
        firsts = np.cumsum(self.counts) - self.counts
        return self.blocks[firsts[which] + at // self.block_size] * self.block_size + at % self.block_size

    def behind(self, row: int, num_tokens: int) -> list[int]:
        """Return a sequence's blocks from that on which holds token `num_tokens`."""
        return self._lists[row][num_tokens // self.block_size : self.counts[row]]
