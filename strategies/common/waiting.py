"""Keep the requests that wait for a scheduler in the order of arrival, and let each in when there is room for it.
Torch-free."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from harness.engine.sequences import Sequence, State
from harness.memory.kv_cache import Blocks


class WaitingRequests:
    """The queue of a scheduler over one block allocator.

    A request that could not run even alone would block the queue for ever: it is rejected, with the reason, when its
    turn comes. `longest` is how many tokens of a request the buffers of `place` hold: of its prompt, or, where
    sequences may be preempted, of all that it will ever have, with which it is prefilled again.
    """

    def __init__(
        self, sequences: Iterable[Sequence], allocator: Blocks, *, longest: int, place: str, preempts: bool = False
    ) -> None:
        self._queue = deque(sequences)
        self._allocator, self._longest, self._place, self._preempts = allocator, longest, place, preempts

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def head(self) -> Sequence | None:
        """The request whose turn it is; None where nobody waits."""
        while self._queue:
            head = self._queue[0]
            if (reason := self._never_fits(head)) is None:
                return head
            head.state, head.reject_reason = State.REJECTED, reason
            self._queue.popleft()
        return None

    def admit(self, head: Sequence, num_tokens: int) -> bool:
        """Take the head out of the queue, with blocks for `num_tokens`. Returns False where these are not free, and
        leaves it there."""
        assert head is self._queue[0], "nobody is let in ahead of others"
        if self._allocator.missing_blocks(head, num_tokens) > self._allocator.free_for(head):
            return False
        self._allocator.grow(head, num_tokens)
        self._queue.popleft()
        return True

    def put_back(self, preempted: Sequence) -> None:
        """Let a sequence that has given its blocks back wait ahead of all others."""
        self._queue.appendleft(preempted)

    def _never_fits(self, sequence: Sequence) -> str | None:
        needed, most = self._allocator.blocks_for(sequence.max_tokens), self._allocator.max_sequence_blocks
        if needed > most:
            return f"needs {needed} KV blocks, the cache has {most}"
        if self._preempts and sequence.max_tokens > self._longest:
            return f"{sequence.max_tokens} tokens exceed the {self._longest} that {self._place} can hold"
        if sequence.prompt_len > self._longest:
            return f"prompt of {sequence.prompt_len} tokens exceeds the {self._longest} that {self._place} can hold"
        return None
