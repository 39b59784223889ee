"""Keep several batches in the model at the same time, for GPUs that are stages of a pipeline. Torch-free.

FlexGen (§4.3 of its paper) has as many in flight as there are GPUs, each going through all stages before its next step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq

from harness.engine.batch import PassPlan
from harness.engine.sequences import Sequence
from harness.engine.strategy import Scheduler
from harness.memory.kv_cache import Blocks


class TakingTurns:
    """Takes passes in turn from its schedulers, one for each batch; none has two passes under way.

    A scheduler that has ended is left out.
    """

    def __init__(self, schedulers: Seq[Scheduler]) -> None:
        self._schedulers = list(schedulers)  # the one whose turn it is first
        self._under_way: dict[PassPlan, Scheduler] = {}

    @property
    def num_waiting(self) -> int:
        return sum(scheduler.num_waiting for scheduler in self._schedulers)

    def next_pass(self) -> PassPlan | None:
        """Return the next scheduler's pass; None where all that have something left to do have a pass under way."""
        for scheduler in list(self._schedulers):
            if scheduler in self._under_way.values():
                continue
            self._schedulers.remove(scheduler)
            if (plan := scheduler.next_pass()) is not None:
                self._schedulers.append(scheduler)
                self._under_way[plan] = scheduler
                return plan
        return None

    def retire(self, plan: PassPlan, ended: list[Sequence]) -> None:
        self._under_way.pop(plan).retire(plan, ended)


class BlockShare:
    """A share of at most `num_blocks` of the given blocks, as if they were all there are. See `BlockAllocator`."""

    def __init__(self, blocks: Blocks, num_blocks: int) -> None:
        self._blocks = blocks
        self.block_size, self.num_blocks = blocks.block_size, num_blocks
        self._holders: dict[Sequence, None] = {}

    @property
    def num_used(self) -> int:
        """The blocks in use, counted from their holders, since blocks are given back without telling this share."""
        self._holders = {sequence: None for sequence in self._holders if sequence.blocks}
        return sum(len(sequence.blocks) for sequence in self._holders)

    @property
    def num_free(self) -> int:
        return self.num_blocks - self.num_used

    @property
    def max_sequence_blocks(self) -> int:
        return min(self.num_blocks, self._blocks.max_sequence_blocks)

    def free_for(self, sequence: Sequence) -> int:
        return min(self.num_free, self._blocks.free_for(sequence))

    def blocks_for(self, num_tokens: int) -> int:
        return self._blocks.blocks_for(num_tokens)

    def missing_blocks(self, sequence: Sequence, num_tokens: int) -> int:
        return self._blocks.missing_blocks(sequence, num_tokens)

    def grow(self, sequence: Sequence, num_tokens: int) -> None:
        assert self.missing_blocks(sequence, num_tokens) <= self.num_free, "more blocks than the share has"
        self._blocks.grow(sequence, num_tokens)
        self._holders[sequence] = None

    def release(self, sequence: Sequence) -> list[int]:
        return self._blocks.release(sequence)

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Check all the blocks, not only this share's; `sequences` are those of every share."""
        self._blocks.check_integrity(sequences)
        assert self.num_used <= self.num_blocks, "more blocks than the share has"


def dealt_out(sequences: Iterable[Sequence], blocks: Blocks, count: int) -> Iterator[tuple[list[Sequence], BlockShare]]:
    """Yield requests and blocks in `count` similar shares."""
    for requests in like_shares(sequences, count):
        yield requests, BlockShare(blocks, blocks.num_blocks // count)


def like_shares(sequences: Iterable[Sequence], count: int) -> list[list[Sequence]]:
    """Return `count` similar shares with requests of every length. The first has the most prompts and prompt tokens."""
    ordered = sorted(sequences, key=lambda s: s.prompt_len, reverse=True)
    return [ordered[number::count] for number in range(count)]
