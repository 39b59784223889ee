"""Schedule continuous batching: decode and prefill share a pass, and preemption makes room for KV blocks. Torch-free.

MoE-Lens's resource-aware scheduler (its §6.2) and vLLM's default one are this, with different limits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from harness.engine.batch import PassPlan
from harness.engine.sequences import Sequence, State, missing_blocks, without_room
from harness.memory.kv_cache import KVCache
from harness.memory.split_kv import SplitKVCache
from strategies.common.waiting import WaitingRequests

_Memory = tuple[bool, int]  # on the device, and of which GPU


class ContinuousBatches:
    """Keeps a prefill queue (FIFO) and a decode list (oldest first) over one block allocator.

    In normal mode every decoding sequence runs, then prefill from the queue's head while decode and prefill tokens
    together stay within `fill_to` and blocks are free. Preemption mode is for decoding sequences that cannot all get
    the block of their next token: the newest give their blocks back and go to the queue's head, and no sequence is
    admitted beside those that go on. Where nothing would run, the head of the queue is admitted or rejected. A prompt
    that does not fit what decoding leaves of `fill_to` is still admitted, as its pass's only prefill, while decoding
    leaves anything. On small machines, where `fill_to` is not far above a prompt's length, this prompt would otherwise
    block the queue until decoding has drained. `max_pass_tokens` is what the activation buffers hold. At most
    `max_sequences`, where it is given, run at a time.
    """

    def __init__(
        self,
        sequences: Iterable[Sequence],
        kv: KVCache | SplitKVCache,
        *,
        fill_to: int,
        max_pass_tokens: int,
        max_sequences: int | None = None,
    ) -> None:
        self._decoding: list[Sequence] = []
        self._kv = kv
        self._allocator = kv.allocator
        self._waiting = WaitingRequests(
            sequences, kv.allocator, longest=max_pass_tokens, place="one pass", preempts=True
        )
        self._fill_to = fill_to
        self._max_pass_tokens = max_pass_tokens
        self._max_sequences = max_sequences

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def next_pass(self) -> PassPlan | None:
        preempted = self._preempt()
        decode = self._decoding[: self._max_pass_tokens]
        for sequence in without_room(decode, self._allocator.block_size):
            self._allocator.grow(sequence, sequence.num_tokens)
        prefill = [] if preempted and decode else self._admit(num_decode=len(decode))
        if not decode and not prefill:
            return None
        return PassPlan(prefill, decode, "preemption" if preempted else "normal", num_preemptions=preempted)

    def retire(self, plan: PassPlan, ended: list[Sequence]) -> None:
        gone = set(ended)
        self._decoding = [s for s in (*self._decoding, *plan.prefill) if s not in gone]

    def _preempt(self) -> int:
        """Take blocks from the newest sequences until all others can decode, and return how many were preempted. Where
        blocks lie in several memories, these are the newest of a memory that is short of them."""
        short = without_room(self._decoding, self._allocator.block_size)
        missing: Counter[_Memory] = Counter()
        for sequence, count in zip(short, missing_blocks(short, self._allocator.block_size).tolist(), strict=True):
            missing[_memory(sequence)] += count
        of_memory = dict(zip(map(_memory, short), short, strict=True))
        free = Counter({memory: self._allocator.free_for(sequence) for memory, sequence in of_memory.items()})
        kept: list[Sequence] = []  # though newer than one that is not
        left, num_preempted = self._decoding, 0
        while any(count > free[memory] for memory, count in missing.items()):
            sequence = left.pop()
            memory = _memory(sequence)
            if missing[memory] <= free[memory]:
                kept.append(sequence)
                continue
            missing[memory] -= self._allocator.missing_blocks(sequence, sequence.num_tokens)
            free[memory] += len(sequence.blocks)
            self._kv.release(sequence)
            sequence.state = State.PREEMPTED
            sequence.num_preemptions += 1
            self._waiting.put_back(sequence)
            num_preempted += 1
        left += reversed(kept)
        return num_preempted

    def _admit(self, num_decode: int) -> list[Sequence]:
        chosen: list[Sequence] = []
        num_tokens = num_decode
        while head := self._waiting.head:
            if self._max_sequences is not None and len(self._decoding) + len(chosen) >= self._max_sequences:
                break
            if num_tokens + head.num_tokens > self._limit(is_first=not chosen, num_decode=num_decode):
                break
            if not self._waiting.admit(head, head.num_tokens):
                break
            head.state = State.PREFILL
            num_tokens += head.num_tokens
            chosen.append(head)
        return chosen

    def _limit(self, *, is_first: bool, num_decode: int) -> int:
        """Return the number of tokens that the pass may have with one more prefill."""
        return self._max_pass_tokens if is_first and num_decode < self._fill_to else self._fill_to


def _memory(sequence: Sequence) -> _Memory:
    """Return in which memory the blocks of a sequence lie."""
    return sequence.kv_on_device, sequence.kv_rank
