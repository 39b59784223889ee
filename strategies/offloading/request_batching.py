"""Request batching (MoE-Lightning §A.2, Algorithm 2), and the scheduler that runs such batches one after another.

The algorithm as printed loses requests: partitions that never fill are not returned, and what fits no empty one would
be put off for ever. Here partial micro-batches end the batch, and what can never fit is rejected with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from heapq import heappop, heapreplace
from operator import attrgetter
from typing import TypeVar

import numpy as np

from harness.engine.batch import PassPlan
from harness.engine.sequences import Sequence, State, max_tokens, prompt_lens
from harness.memory.kv_cache import Blocks

Tokens = TypeVar("Tokens", int, np.ndarray)
_NO_LIMIT = 1 << 62
_LOOKED_AT = 64  # requests at once, and twice as many each further time


@dataclass(frozen=True, kw_only=True)
class BatchLimits:
    """A batch and its micro-batches stay within these limits. Tokens of the cache are counted at a request's end, as
    `cached_tokens` of `batch_requests` says."""

    num_micro_batches: int  # n_ub
    micro_batch_size: int  # ubs, in requests
    micro_batch_cache_tokens: int  # cache_size
    batch_size: int | None = None  # requests of all micro-batches together; null: as many as fill them
    cache_tokens: int | None = None  # of all micro-batches together; null: no limit of its own
    micro_batch_prompt_tokens: int | None = None  # what the buffers of a prefill hold; null: anything
    prompt_tokens: int | None = None  # what they hold for all micro-batches together; null: anything

    def __post_init__(self) -> None:
        assert self.num_micro_batches >= 1, "a batch has a micro-batch"
        assert self.micro_batch_size >= 1, "a micro-batch has a request"
        assert self.batch_size is None or self.batch_size >= 1, "a batch has a request"


@dataclass(frozen=True)
class Waiting:
    """Holds requests that wait, longest prompt first (line 4); of equal length in the order in which they came.

    They are sorted and read once, however many batches are made of them.
    """

    sequences: np.ndarray  # Sequence [sequences]
    prompt_lens: np.ndarray  # int64 [sequences]
    max_tokens: np.ndarray  # int64 [sequences]

    @classmethod
    def of(cls, queue: Iterable[Sequence]) -> Waiting:
        waiting = sorted(queue, key=attrgetter("prompt_len"), reverse=True)
        return cls(np.array([*waiting, None])[:-1], prompt_lens(waiting), max_tokens(waiting))

    def __len__(self) -> int:
        return len(self.sequences)

    def without(self, gone: list[int]) -> Waiting:
        """Return those whose numbers, which ascend, are not among these."""
        left: slice | np.ndarray = slice(len(gone), None)
        if gone and gone[-1] >= len(gone):  # not the first ones
            left = np.ones(len(self), bool)
            left[gone] = False
        return Waiting(self.sequences[left], self.prompt_lens[left], self.max_tokens[left])


@dataclass(frozen=True)
class Batching:
    """The result of batching: each waiting request is in exactly one place."""

    micro_batches: list[list[Sequence]]  # none is empty; in order of completion
    aborted: Waiting  # for the next batch


def prompt_and_generation(num_tokens: Tokens) -> Tokens:
    """Return the tokens that Algorithm 2 counts: those of the prompt and those to generate. The last of these is not
    among the `num_tokens` that a request brings to the cache."""
    return num_tokens + 1


def batch_requests(
    waiting: Waiting,
    limits: BatchLimits,
    *,
    cached_tokens: Callable[[np.ndarray], np.ndarray] = prompt_and_generation,
    padded: bool = False,
    take: Callable[[Sequence, int], bool] = lambda sequence, padding: True,
) -> Batching:
    """Make one batch of the longest requests. Each must fit a batch of its own (`never_fits`).

    `cached_tokens` says what the tokens that requests bring to the cache count as; more of them count no less. With
    `padded` each prompt counts as long as the longest of the batch. `take` is asked for each request that is within all
    limits, with the tokens that its prompt lacks of that length: it puts the request into the cache, or refuses it for
    this batch where there is no room. It must not refuse the first one.
    """
    if not waiting:
        return Batching([], waiting)
    counted = _Counted(waiting, cached_tokens, padded=padded)
    shortest, least = counted.least_prompt, counted.least_cached
    complete: list[list[Sequence]] = []
    taken: list[int] = []  # numbers of requests; line 9: whatever goes into no micro-batch is aborted
    micro_batches: list[list[Sequence]] = [[] for _ in range(limits.num_micro_batches)]
    cached_in = [0] * limits.num_micro_batches
    filling = [(0, number) for number in range(limits.num_micro_batches)]  # a heap, by the tokens of prompts
    at, total, total_prompts = 0, 0, 0
    while at < len(waiting) and filling and len(taken) != limits.batch_size:  # line 6
        cache_room, prompt_room = _left(limits.cache_tokens, total), _left(limits.prompt_tokens, total_prompts)
        if least > cache_room or shortest > prompt_room:
            break
        prompt_tokens, lightest = filling[0]  # line 8
        cache_room = min(cache_room, _left(limits.micro_batch_cache_tokens, cached_in[lightest]))
        prompt_room = min(prompt_room, _left(limits.micro_batch_prompt_tokens, prompt_tokens))
        found = counted.first_within(prompt_room, cache_room, at)
        if found == len(waiting):
            break
        at = found + 1
        sequence, prompt, its_cached = waiting.sequences[found], int(counted.prompts[found]), int(counted.cached[found])
        if not take(sequence, prompt - sequence.prompt_len):
            continue
        taken.append(found)
        micro_batches[lightest].append(sequence)
        cached_in[lightest] += its_cached
        total, total_prompts = total + its_cached, total_prompts + prompt
        if len(micro_batches[lightest]) < limits.micro_batch_size:
            heapreplace(filling, (prompt_tokens + prompt, lightest))
        else:  # line 14
            complete.append(micro_batches[lightest])
            heappop(filling)
    begun = sorted(number for _, number in filling if micro_batches[number])
    return Batching([*complete, *(micro_batches[number] for number in begun)], waiting.without(taken))


def _left(limit: int | None, taken: int) -> int:
    return _NO_LIMIT if limit is None else limit - taken


class _Counted:
    """Counts the tokens of waiting requests for a batch as far as they are looked at."""

    def __init__(self, waiting: Waiting, cached_tokens: Callable[[np.ndarray], np.ndarray], *, padded: bool) -> None:
        self._waiting, self._cached_tokens = waiting, cached_tokens
        self._longest = int(waiting.prompt_lens[0]) if padded else None
        self.prompts = self.cached = np.empty(0, np.int64)  # of the first requests
        self.least_prompt = self._longest or int(waiting.prompt_lens[-1])
        self.least_cached = int(cached_tokens(self._most_tokens(slice(None)).min(keepdims=True))[0])

    def first_within(self, most_prompt: int, most_cached: int, first: int) -> int:
        """Return the first request from number `first` on that is within both; how many there are where none is."""
        step = 1  # most often it is the first one
        while first < len(self._waiting):
            if first + step > len(self.prompts):
                self._count(2 * first + step)
            piece = slice(first, first + step)
            within = (self.prompts[piece] <= most_prompt) & (self.cached[piece] <= most_cached)
            if within.any():
                return first + int(within.argmax())
            first, step = first + step, max(_LOOKED_AT, 2 * step)
        return len(self._waiting)

    def _count(self, number: int) -> None:
        """Count so many requests."""
        more = slice(len(self.prompts), number)
        lens = self._waiting.prompt_lens[more]
        prompts = lens if self._longest is None else np.full_like(lens, self._longest)
        self.prompts = np.concatenate((self.prompts, prompts))
        self.cached = np.concatenate((self.cached, self._cached_tokens(self._most_tokens(more))))

    def _most_tokens(self, which: slice) -> np.ndarray:
        """Return the tokens that requests bring to the cache, padding included."""
        tokens = self._waiting.max_tokens[which]
        return tokens if self._longest is None else tokens - self._waiting.prompt_lens[which] + self._longest


def never_fits(prompt: int, cached: int, limits: BatchLimits) -> str | None:
    """Return why a request of these tokens does not fit even a batch of its own; None where it does."""
    for limit in (limits.micro_batch_cache_tokens, limits.cache_tokens):
        if cached > _left(limit, 0):
            return f"needs the KV cache of {cached} tokens, there is one of {limit}"
    for limit in (limits.micro_batch_prompt_tokens, limits.prompt_tokens):
        if prompt > _left(limit, 0):
            return f"prompt of {prompt} tokens exceeds the {limit} that a prefill can hold"
    return None


class BatchScheduler:
    """Takes a batch by Algorithm 2, prefills it, decodes it to the end of its longest request, takes the next.

    Blocks for each sequence's full length are set aside when its batch begins, so nothing is ever preempted. The plans
    carry the micro-batches, and each has a KV partition of its own. `num_micro_batches` is what a full batch has; what
    the queue has left fills fewer of them, but not fewer than `min_micro_batches`.

    `micro_batch_prompt_tokens` and `prompt_tokens` are what the buffers of a prefill hold for one micro-batch and for
    all, padding included where prompts are `padded` to the longest of their batch. `micro_batch_cache_tokens` null: the
    cache is shared out evenly, and any request may have what it needs.
    """

    def __init__(
        self,
        sequences: Iterable[Sequence],
        allocator: Blocks,
        *,
        num_micro_batches: int,
        micro_batch_size: int,
        micro_batch_prompt_tokens: int,
        batch_size: int | None = None,
        prompt_tokens: int | None = None,
        micro_batch_cache_tokens: int | None = None,
        min_micro_batches: int = 1,
        padded: bool = False,
    ) -> None:
        self._waiting = Waiting.of(sequences)
        self._allocator = allocator
        self._num_micro_batches = num_micro_batches
        self._min_micro_batches = min(min_micro_batches, num_micro_batches)
        self._micro_batch_size, self._batch_size = micro_batch_size, batch_size
        self._micro_batch_prompt_tokens, self._prompt_tokens = micro_batch_prompt_tokens, prompt_tokens
        self._micro_batch_cache_tokens = micro_batch_cache_tokens
        self._padded = padded
        self._running: list[list[Sequence]] = []

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def next_pass(self) -> PassPlan | None:
        if self._running:
            together = [s for micro_batch in self._running for s in micro_batch]
            return PassPlan(prefill=[], decode=together, mode="decode", micro_batches=self._copy())
        self._reject_what_never_fits()
        if not self._waiting:
            return None
        self._take_batch()
        together = [s for micro_batch in self._running for s in micro_batch]
        return PassPlan(prefill=together, decode=[], mode="prefill", micro_batches=self._copy())

    def retire(self, plan: PassPlan, ended: list[Sequence]) -> None:
        gone = set(ended)
        left = [[s for s in micro_batch if s not in gone] for micro_batch in self._running]
        self._running = [micro_batch for micro_batch in left if micro_batch]

    def _copy(self) -> list[list[Sequence]]:
        return [list(micro_batch) for micro_batch in self._running]

    def _reject_what_never_fits(self) -> None:
        """Reject what does not fit even alone: in the whole cache, or in the buffers of a prefill."""
        limits, most = self._limits(), self._allocator.max_sequence_blocks
        prompt, cached = int(self._waiting.prompt_lens.max(initial=0)), self._most_cached()
        if cached <= most * self._allocator.block_size and never_fits(prompt, cached, limits) is None:
            return  # a queue of thousands is not gone through for each batch
        gone = []
        for number, sequence in enumerate(self._waiting.sequences):
            needed = self._allocator.blocks_for(sequence.max_tokens)
            reason = never_fits(sequence.prompt_len, self._in_blocks(sequence.max_tokens), limits)
            if needed > most:
                reason = f"needs {needed} KV blocks, the cache has {most}"
            if reason is not None:
                gone.append(number)
                sequence.state, sequence.reject_reason = State.REJECTED, reason
        self._waiting = self._waiting.without(gone)

    def _take_batch(self) -> None:
        batching = batch_requests(
            self._waiting,
            self._limits(),
            cached_tokens=self._in_blocks,
            padded=self._padded,
            take=self._take_blocks,
        )
        assert batching.micro_batches, "what can run alone makes a batch"
        self._waiting = batching.aborted
        self._running = batching.micro_batches
        for number, micro_batch in enumerate(self._running):
            for sequence in micro_batch:
                sequence.partition = number
                sequence.state = State.PREFILL

    def _take_blocks(self, sequence: Sequence, padding: int) -> bool:
        """Take all blocks that the request will ever need, on one side of the cache where it has two.

        Returns whether there was room for them.
        """
        num_tokens = sequence.max_tokens + padding
        if self._allocator.missing_blocks(sequence, num_tokens) > self._allocator.free_for(sequence):
            return False
        sequence.padding = padding
        self._allocator.grow(sequence, num_tokens)
        return True

    def _limits(self) -> BatchLimits:
        wanted = -(-len(self._waiting) // self._micro_batch_size)
        number = min(self._num_micro_batches, max(wanted, self._min_micro_batches))
        cache_tokens = self._allocator.num_free * self._allocator.block_size
        return BatchLimits(
            num_micro_batches=number,
            micro_batch_size=self._micro_batch_size,
            batch_size=self._batch_size,
            micro_batch_cache_tokens=self._micro_batch_cache_tokens or max(cache_tokens // number, self._most_cached()),
            cache_tokens=cache_tokens,
            micro_batch_prompt_tokens=self._micro_batch_prompt_tokens,
            prompt_tokens=self._prompt_tokens,
        )

    def _most_cached(self) -> int:
        """Return the most tokens that a waiting request's blocks hold, without padding."""
        return self._in_blocks(int(self._waiting.max_tokens.max(initial=0)))

    def _in_blocks(self, num_tokens: Tokens) -> Tokens:
        """Return the tokens that whole blocks for so many hold."""
        size = self._allocator.block_size
        return -(-num_tokens // size) * size
