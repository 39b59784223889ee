"""Accumulate a batch, prefill all of it, decode all of it to its end, and take the next one. Torch-free."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from itertools import groupby

from harness.engine.batch import PassPlan
from harness.engine.sequences import Sequence, State
from harness.memory.kv_cache import Blocks
from strategies.common.waiting import WaitingRequests
from strategies.moegen.memory import PhaseSizes
from strategies.moegen.policy import Policy


class AccumulatedBatches:
    """Takes batches one after another, with prefill and decode apart.

    A batch has as many sequences as the policy says and as the cache holds at their ends, so that none is preempted. It
    is prefilled in accumulated batches of the prefill's size. The plans carry micro-batches: in decode first those for
    which the CPU attends, then those for which the GPU does. The sequences of a micro-batch share a KV partition, so
    that one may be loaded while another one is appended to. Prompts may be `padded` to the longest of their batch.
    """

    def __init__(
        self,
        sequences: Iterable[Sequence],
        allocator: Blocks,
        policy: Policy,
        prefill: PhaseSizes,
        *,
        padded: bool = False,
    ) -> None:
        waiting = list(sequences)
        if padded:
            waiting.sort(key=lambda s: s.prompt_len, reverse=True)  # each batch begins with its longest
        self._waiting = WaitingRequests(waiting, allocator, longest=prefill.micro_batch_rows, place="a prefill")
        self._policy, self._sizes, self._padded = policy, prefill, padded
        self._admitted: deque[Sequence] = deque()  # blocks set aside, not prefilled yet
        self._running: list[Sequence] = []

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + len(self._admitted)

    def next_pass(self) -> PassPlan | None:
        if not self._admitted and not self._running:
            self._admit_batch()
        if self._admitted:
            chosen = self._next_prefill()
            return PassPlan(prefill=chosen, decode=[], mode="prefill", micro_batches=list(self._prompts(chosen)))
        if self._running:
            num_cpu = self._policy.decode.num_on_cpu(len(self._running))
            cut = [*self._rows(self._running[:num_cpu]), *self._rows(self._running[num_cpu:])]
            return PassPlan(prefill=[], decode=list(self._running), mode="decode", micro_batches=cut)
        return None

    def retire(self, plan: PassPlan, ended: list[Sequence]) -> None:
        gone = set(ended)
        self._running = [s for s in (*self._running, *plan.prefill) if s not in gone]

    def _admit_batch(self) -> None:
        batch: list[Sequence] = []
        while len(batch) < self._policy.decode.batch_size and (head := self._waiting.head):
            head.padding = batch[0].prompt_len - head.prompt_len if self._padded and batch else 0
            if not self._waiting.admit(head, head.max_tokens + head.padding):
                break
            batch.append(head)
        num_cpu, size = self._policy.decode.num_on_cpu(len(batch)), self._policy.decode.attention_batch
        number = 0
        for part in (batch[:num_cpu], batch[num_cpu:]):
            for first in range(0, len(part), size):
                for sequence in part[first : first + size]:
                    sequence.partition = number
                number += 1
        self._admitted.extend(batch)

    def _next_prefill(self) -> list[Sequence]:
        chosen: list[Sequence] = []
        num_tokens = 0
        while self._admitted and len(chosen) < self._policy.prefill.batch_size:
            num_tokens += _prompt(self._admitted[0])
            if num_tokens > self._sizes.rows:
                break
            chosen.append(self._admitted.popleft())
            chosen[-1].state = State.PREFILL
        return chosen

    def _prompts(self, chosen: Seq[Sequence]) -> Iterator[list[Sequence]]:
        """Yield the prompts in micro-batches of b_a sequences, as far as the buffers hold their tokens."""
        part: list[Sequence] = []
        num_tokens = 0
        for sequence in chosen:
            is_full = len(part) == self._policy.prefill.attention_batch
            if is_full or num_tokens + _prompt(sequence) > self._sizes.micro_batch_rows:
                yield part
                part, num_tokens = [], 0
            part.append(sequence)
            num_tokens += _prompt(sequence)
        yield part

    def _rows(self, sequences: Seq[Sequence]) -> Iterator[list[Sequence]]:
        """Yield decoding sequences in micro-batches of whole partitions, as many together as b_a allows."""
        part: list[Sequence] = []
        for _, group in groupby(sequences, key=lambda s: s.partition):
            members = list(group)
            if part and len(part) + len(members) > self._policy.decode.attention_batch:
                yield part
                part = []
            part += members
        if part:
            yield part


def _prompt(sequence: Sequence) -> int:
    return sequence.prompt_len + sequence.padding
