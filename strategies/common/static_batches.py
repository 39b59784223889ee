"""Static batching keeps the phases apart: fill the KV cache, prefill all of it, decode all of it to the end, repeat.

Room for each sequence's full length is set aside at admission, so nothing is ever preempted. Schedulers of systems
without prefill/decode overlap (PAPERS: MoE-Lightning, MoE-Gen, FlexGen) start from this.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from harness.engine.batch import PassPlan
from harness.engine.sequences import Sequence, State
from harness.memory.kv_cache import Blocks
from strategies.common.waiting import WaitingRequests


class StaticBatches:
    """Runs batches one after another; a batch has as many sequences as the cache holds.

    `max_pass_tokens` bounds one prefill pass; a batch larger than that is prefilled in several. `max_batch`, where it
    is given, bounds the sequences of a batch.
    """

    def __init__(
        self, sequences: Iterable[Sequence], allocator: Blocks, *, max_pass_tokens: int, max_batch: int | None = None
    ) -> None:
        self._max_batch = max_batch
        self._waiting = WaitingRequests(sequences, allocator, longest=max_pass_tokens, place="one pass")
        self._max_pass_tokens = max_pass_tokens
        self._admitted: deque[Sequence] = deque()  # blocks set aside, not prefilled yet
        self._running: list[Sequence] = []

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + len(self._admitted)

    def next_pass(self) -> PassPlan | None:
        if not self._admitted and not self._running:
            self._admit_batch()
        if self._admitted:
            return PassPlan(prefill=self._next_prefill(), decode=[], mode="prefill")
        if self._running:
            return PassPlan(prefill=[], decode=self._running[: self._max_pass_tokens], mode="decode")
        return None

    def retire(self, plan: PassPlan, ended: list[Sequence]) -> None:
        gone = set(ended)
        self._running.extend(plan.prefill)
        decoded = set(plan.decode)
        waiting = [s for s in self._running if s not in decoded and s not in gone]
        self._running = waiting + [s for s in self._running if s in decoded and s not in gone]

    def _admit_batch(self) -> None:
        while (self._max_batch is None or len(self._admitted) < self._max_batch) and (head := self._waiting.head):
            if not self._waiting.admit(head, head.max_tokens):
                return
            self._admitted.append(head)

    def _next_prefill(self) -> list[Sequence]:
        chosen: list[Sequence] = []
        num_tokens = 0
        while self._admitted and num_tokens + self._admitted[0].prompt_len <= self._max_pass_tokens:
            sequence = self._admitted.popleft()
            sequence.state = State.PREFILL
            num_tokens += sequence.prompt_len
            chosen.append(sequence)
        return chosen
