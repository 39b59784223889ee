"""Request batching (MoE-Lightning §A.2, Algorithm 2), and the scheduler that runs such batches one after another.

The algorithm as printed loses requests: partitions that never fill are not returned, and what fits no empty one would
be put off for ever. Here partial micro-batches end the batch, and what can never fit is rejected with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
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


@dataclass(kw_only=True)
class Batching:
    """The result of batching: each request of the queue is in exactly one of these lists."""

    micro_batches: list[list[Sequence]] = field(default_factory=list)  # none is empty; in order of completion
    aborted: list[Sequence] = field(default_factory=list)  # for the next batch, longest first


def prompt_and_generation(num_tokens: Tokens) -> Tokens:
    """Return the tokens that Algorithm 2 counts: those of the prompt and those to generate. The last of these is not
    among the `num_tokens` that a request brings to the cache."""
    return num_tokens + 1


def batch_requests(
    queue: Iterable[Sequence],
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
    waiting = sorted(queue, key=attrgetter("prompt_len"), reverse=True)  # line 4; of equal length in their order
    result = Batching()
    if not waiting:
        return result
    lens = prompt_lens(waiting)
    paddings = (lens[0] - lens) * padded
    prompts, cached = lens + paddings, cached_tokens(max_tokens(waiting) + paddings)
    shortest, least = int(prompts[-1]), int(cached.min())
    micro_batches: list[list[Sequence]] = [[] for _ in range(limits.num_micro_batches)]
    cached_in = [0] * limits.num_micro_batches
    filling = [(0, number) for number in range(limits.num_micro_batches)]  # a heap, by the tokens of prompts
    at, taken, total, total_prompts = 0, 0, 0, 0
    while at < len(waiting) and filling and taken != limits.batch_size:  # line 6
        cache_room, prompt_room = _left(limits.cache_tokens, total), _left(limits.prompt_tokens, total_prompts)
        if least > cache_room or shortest > prompt_room:
            break
        prompt_tokens, lightest = filling[0]  # line 8
        cache_room = min(cache_room, _left(limits.micro_batch_cache_tokens, cached_in[lightest]))
        prompt_room = min(prompt_room, _left(limits.micro_batch_prompt_tokens, prompt_tokens))
        found = _first_within(prompts, prompt_room, cached, cache_room, at)
        result.aborted += waiting[at:found]  # line 9: none of them fits
        at = found + 1
        if found == len(waiting):
            break
        sequence = waiting[found]
        if not take(sequence, int(paddings[found])):
            result.aborted.append(sequence)
            continue
        micro_batches[lightest].append(sequence)
        prompt, its_cached = int(prompts[found]), int(cached[found])
        cached_in[lightest] += its_cached
        taken, total, total_prompts = taken + 1, total + its_cached, total_prompts + prompt
        if len(micro_batches[lightest]) < limits.micro_batch_size:
            heapreplace(filling, (prompt_tokens + prompt, lightest))
        else:  # line 14
            result.micro_batches.append(micro_batches[lightest])
            heappop(filling)
    result.aborted += waiting[at:]
    begun = sorted(number for _, number in filling if micro_batches[number])
    result.micro_batches += [micro_batches[number] for number in begun]
    return result


def _left(limit: int | None, taken: int) -> int:
    return _NO_LIMIT if limit is None else limit - taken


def _first_within(prompts: np.ndarray, most_prompt: int, cached: np.ndarray, most_cached: int, first: int) -> int:
    """Return the first request from number `first` on that is within both; how many there are where none is."""
    if first < len(prompts) and prompts[first] <= most_prompt and cached[first] <= most_cached:
        return first  # most often
    step = _LOOKED_AT
    while first < len(prompts):
        piece = slice(first, first + step)
        within = (prompts[piece] <= most_prompt) & (cached[piece] <= most_cached)
        if within.any():
            return first + int(within.argmax())
        first, step = first + step, 2 * step
    return len(prompts)


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
        self._queue = list(sequences)
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
        return len(self._queue)

    def next_pass(self) -> PassPlan | None:
        if self._running:
            together = [s for micro_batch in self._running for s in micro_batch]
            return PassPlan(prefill=[], decode=together, mode="decode", micro_batches=self._copy())
        self._reject_what_never_fits()
        if not self._queue:
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
        prompt, cached = int(prompt_lens(self._queue).max(initial=0)), self._most_cached()
        if cached <= most * self._allocator.block_size and never_fits(prompt, cached, limits) is None:
            return  # a queue of thousands is not gone through for each batch
        kept = []
        for sequence in self._queue:
            needed = self._allocator.blocks_for(sequence.max_tokens)
            reason = never_fits(sequence.prompt_len, self._in_blocks(sequence.max_tokens), limits)
            if needed > most:
                reason = f"needs {needed} KV blocks, the cache has {most}"
            if reason is None:
                kept.append(sequence)
            else:
                sequence.state, sequence.reject_reason = State.REJECTED, reason
        self._queue = kept

    def _take_batch(self) -> None:
        batching = batch_requests(
            self._queue,
            self._limits(),
            cached_tokens=self._in_blocks,
            padded=self._padded,
            take=self._take_blocks,
        )
        assert batching.micro_batches, "what can run alone makes a batch"
        self._queue = batching.aborted
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
        wanted = -(-len(self._queue) // self._micro_batch_size)
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
        return self._in_blocks(int(max_tokens(self._queue).max(initial=0)))

    def _in_blocks(self, num_tokens: Tokens) -> Tokens:
        """Return the tokens that whole blocks for so many hold."""
        size = self._allocator.block_size
        return -(-num_tokens // size) * size
