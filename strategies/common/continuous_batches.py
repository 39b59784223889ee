"""Schedule continuous batching: decode and prefill share a pass, and preemption makes room for KV blocks. Torch-free.

MoE-Lens's resource-aware scheduler (its §6.2) and vLLM's default one are this, with different limits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from harness.engine.batch import PassPlan
from harness.engine.sequences import Sequence, State
from harness.memory.kv_cache import KVCache
from harness.memory.split_kv import SplitKVCache


class ContinuousBatches:
    """Keeps a prefill queue (FIFO) and a decode list (oldest first) over one block allocator.

    In normal mode every decoding sequence runs, then prefill from the queue's head while decode and prefill tokens
    together stay within `fill_to` and blocks are free. Preemption mode is for decoding sequences that cannot all get
    the block of their next token: the newest give their blocks back and go to the queue's head, and no sequence is
    admitted. Where nothing would run, the head of the queue is admitted or rejected. A prompt that does not fit what
    decoding leaves of `fill_to` is still admitted, as its pass's only prefill, while decoding leaves anything. On small
    machines, where `fill_to` is not far above a prompt's length, this prompt would otherwise block the queue until
    decoding has drained. `max_pass_tokens` is what the activation buffers hold. At most `max_sequences`, where it is
    given, run at a time.
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
        self._queue = deque(sequences)
        self._decoding: list[Sequence] = []
        self._kv = kv
        self._allocator = kv.allocator
        self._fill_to = fill_to
        self._max_pass_tokens = max_pass_tokens
        self._max_sequences = max_sequences

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    def next_pass(self) -> PassPlan | None:
        preempted = self._preempt()
        decode = self._decoding[: self._max_pass_tokens]
        for sequence in decode:
            self._allocator.grow(sequence, sequence.num_tokens)
        prefill = [] if preempted else self._admit(num_decode=len(decode))
        if not decode and not prefill:
            return None
        return PassPlan(prefill, decode, "preemption" if preempted else "normal", num_preemptions=preempted)

    def retire(self, plan: PassPlan, ended: list[Sequence]) -> None:
        gone = set(ended)
        self._decoding = [s for s in (*self._decoding, *plan.prefill) if s not in gone]

    def _preempt(self) -> int:
        """Take blocks from the newest sequences until all others can decode, and return how many were preempted."""
        missing = sum(self._allocator.missing_blocks(s, s.num_tokens) for s in self._decoding)
        count = 0
        while missing > self._allocator.num_free:
            newest = self._decoding.pop()
            missing -= self._allocator.missing_blocks(newest, newest.num_tokens)
            self._kv.release(newest)
            newest.state = State.PREEMPTED
            newest.num_preemptions += 1
            self._queue.appendleft(newest)
            count += 1
        return count

    def _admit(self, num_decode: int) -> list[Sequence]:
        chosen: list[Sequence] = []
        num_tokens = num_decode
        while self._queue:
            head = self._queue[0]
            if reason := self._never_fits(head):
                head.state, head.reject_reason = State.REJECTED, reason
                self._queue.popleft()
                continue
            if self._max_sequences is not None and len(self._decoding) + len(chosen) >= self._max_sequences:
                break
            if num_tokens + head.num_tokens > self._limit(is_first=not chosen, num_decode=num_decode):
                break
            if self._allocator.missing_blocks(head, head.num_tokens) > self._allocator.num_free:
                break
            self._allocator.grow(head, head.num_tokens)
            head.state = State.PREFILL
            num_tokens += head.num_tokens
            chosen.append(self._queue.popleft())
        return chosen

    def _limit(self, *, is_first: bool, num_decode: int) -> int:
        """Return the number of tokens that the pass may have with one more prefill."""
        return self._max_pass_tokens if is_first and num_decode < self._fill_to else self._fill_to

    def _never_fits(self, sequence: Sequence) -> str | None:
        """Return why a request could not run even alone, or None.

        Such a request would block the queue or be preempted for ever.
        """
        needed = self._allocator.blocks_for(sequence.max_tokens)
        if needed > self._allocator.num_blocks:
            return f"needs {needed} KV blocks, the cache has {self._allocator.num_blocks}"
        if sequence.max_tokens > self._max_pass_tokens:
            return f"{sequence.max_tokens} tokens exceed the {self._max_pass_tokens} that one pass can hold"
        return None
