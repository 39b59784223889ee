"""Continuous batching in slots, as llama-server does it: a request gets a slot as soon as one is free. Torch-free."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from harness.engine.batch import PassPlan
from harness.engine.sequences import Sequence, State
from harness.memory.kv_cache import Blocks
from strategies.common.waiting import WaitingRequests


class Slots:
    """Gives each request one of `num_slots` slots, in the order of arrival, until it has ended.

    A pass has the next token of every slot that generates, then prompts of new requests up to `batch_tokens` together.
    It is cut into micro-batches of at most `micro_batch_tokens`, in this order. A prompt is never cut: one that is
    longer than what a pass or micro-batch may have is the only prompt of its pass, or alone in its micro-batch.
    `max_tokens` is what the activation buffers hold.

    Blocks for the whole request are set aside with its slot, so that nobody is preempted; without them it waits.
    """

    def __init__(
        self,
        sequences: Iterable[Sequence],
        allocator: Blocks,
        *,
        num_slots: int,
        batch_tokens: int,
        micro_batch_tokens: int,
        max_tokens: int,
    ) -> None:
        self._waiting = WaitingRequests(sequences, allocator, longest=max_tokens, place="a micro-batch")
        self._num_slots = num_slots
        self._batch_tokens, self._micro_batch_tokens = batch_tokens, micro_batch_tokens
        self._prompts: deque[Sequence] = deque()  # in a slot, not computed yet
        self._generating: list[Sequence] = []

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + len(self._prompts)

    def next_pass(self) -> PassPlan | None:
        self._fill_slots()
        decode = list(self._generating)
        prefill = self._next_prompts(len(decode))
        if not prefill and not decode:
            return None
        mode = "mixed" if prefill and decode else "prefill" if prefill else "decode"
        return PassPlan(prefill, decode, mode, micro_batches=self._cut(decode, prefill))

    def retire(self, plan: PassPlan, ended: list[Sequence]) -> None:
        gone = set(ended)
        self._generating = [s for s in (*self._generating, *plan.prefill) if s not in gone]

    def _fill_slots(self) -> None:
        while len(self._generating) + len(self._prompts) < self._num_slots and (head := self._waiting.head):
            if not self._waiting.admit(head, head.max_tokens):
                return
            self._prompts.append(head)

    def _next_prompts(self, num_tokens: int) -> list[Sequence]:
        """Take the prompts of the next pass, which already has `num_tokens` tokens."""
        chosen: list[Sequence] = []
        while self._prompts:
            num_tokens += self._prompts[0].prompt_len
            if chosen and num_tokens > self._batch_tokens:
                break
            sequence = self._prompts.popleft()
            sequence.state = State.PREFILL
            chosen.append(sequence)
        return chosen

    def _cut(self, decode: list[Sequence], prefill: list[Sequence]) -> list[list[Sequence]]:
        cut: list[list[Sequence]] = []
        room = 0
        for sequence, num_tokens in (*((s, 1) for s in decode), *((s, s.prompt_len) for s in prefill)):
            if num_tokens > room:
                cut.append([])
                room = self._micro_batch_tokens
            cut[-1].append(sequence)
            room -= num_tokens
        return cut
