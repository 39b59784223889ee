"""Algorithm 2 over random queues and limits: nothing lost, no limit passed, loads balanced; and its scheduler."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.engine.sequences import Sequence, State
from strategies.common.workload_shape import WorkloadShape
from strategies.offloading import request_batching
from strategies.offloading.planning.memory import micro_batch_kv_tokens
from strategies.offloading.request_batching import (
    Batching,
    BatchLimits,
    BatchScheduler,
    Waiting,
    batch_requests,
    never_fits,
    prompt_and_generation,
)
from tests.unit.engine.fakes import sequences
from tests.unit.strategies.driving import FakeKV, Workload, check_conservation, drive, workloads


@st.composite
def cases(draw) -> tuple[list[Sequence], BatchLimits, bool]:
    size = st.tuples(st.integers(1, draw(st.sampled_from((4, 30)))), st.integers(1, 12))
    queue = sequences(*draw(st.lists(size, max_size=25)))
    limits = BatchLimits(
        num_micro_batches=draw(st.integers(1, 6)),
        micro_batch_size=draw(st.integers(1, 6)),
        batch_size=draw(st.one_of(st.none(), st.integers(1, 12))),
        micro_batch_cache_tokens=draw(st.integers(1, 120)),
        cache_tokens=draw(st.one_of(st.none(), st.integers(1, 300))),
        micro_batch_prompt_tokens=draw(st.one_of(st.none(), st.integers(1, 80))),
        prompt_tokens=draw(st.one_of(st.none(), st.integers(1, 200))),
    )
    return queue, limits, draw(st.booleans())


def prompts_of(micro_batch: list[Sequence], longest: int | None) -> list[int]:
    return [s.prompt_len if longest is None else longest for s in micro_batch]


def longest_taken(batching: Batching) -> int:
    return max((s.prompt_len for micro_batch in batching.micro_batches for s in micro_batch), default=0)


@settings(max_examples=300)
@given(cases())
def test_every_request_goes_where_the_limits_allow(case):
    queue, limits, padded = case
    queue = [s for s in queue if never_fits(s.prompt_len, prompt_and_generation(s.max_tokens), limits) is None]
    result = batch_requests(Waiting.of(queue), limits, padded=padded)
    each_goes_to_exactly_one_place(queue, result)
    limits_hold(result, limits, padded)
    left = [s.prompt_len for s in result.aborted.sequences]
    assert left == sorted(left, reverse=True)


@settings(max_examples=300)
@given(cases(), st.integers(1, 4))
def test_what_no_longer_fits_is_left_without_being_asked(case, looked_at):
    """The batch is that of Algorithm 2 gone through to the last request of the queue, however many of them are looked
    at together."""
    queue, limits, padded = case
    queue = [s for s in queue if never_fits(s.prompt_len, prompt_and_generation(s.max_tokens), limits) is None]
    with mock.patch.object(request_batching, "_LOOKED_AT", looked_at):
        result = batch_requests(Waiting.of(queue), limits, padded=padded)
    to_the_end = to_the_last_request(queue, limits, padded)
    assert {frozenset(m) for m in result.micro_batches} == to_the_end


def to_the_last_request(queue, limits, padded) -> set[frozenset[Sequence]]:
    """Algorithm 2 in few words: every request goes to the lightest open micro-batch if all limits hold with it."""
    micro_batches: list[list[Sequence]] = [[] for _ in range(limits.num_micro_batches)]
    longest = max((s.prompt_len for s in queue), default=0)

    def prompts(some: list[Sequence]) -> int:
        return sum(longest if padded else s.prompt_len for s in some)

    def within(some: list[Sequence], cache: int | None, most_prompts: int | None) -> bool:
        cached = prompts(some) + sum(s.request.max_new_tokens for s in some)
        return (cache is None or cached <= cache) and (most_prompts is None or prompts(some) <= most_prompts)

    for sequence in sorted(queue, key=lambda s: -s.prompt_len):
        everyone = [s for m in micro_batches for s in m]
        still_open = [m for m in micro_batches if len(m) < limits.micro_batch_size]
        if not still_open or len(everyone) == limits.batch_size:
            continue
        lightest = min(still_open, key=prompts)
        fits_all = within([*everyone, sequence], limits.cache_tokens, limits.prompt_tokens)
        if fits_all and within(
            [*lightest, sequence], limits.micro_batch_cache_tokens, limits.micro_batch_prompt_tokens
        ):
            lightest.append(sequence)
    return {frozenset(m) for m in micro_batches if m}


def each_goes_to_exactly_one_place(queue, result) -> None:
    places = [*result.aborted.sequences, *(s for m in result.micro_batches for s in m)]
    assert sorted(s.request.request_id for s in places) == [s.request.request_id for s in queue]
    assert all(result.micro_batches), "an empty micro-batch was returned"
    assert result.micro_batches or not result.aborted, "a batch of nobody puts requests off for ever"


def limits_hold(result, limits, padded) -> None:
    longest = longest_taken(result) if padded else None
    all_cached, all_prompts = 0, 0
    assert len(result.micro_batches) <= limits.num_micro_batches
    for micro_batch in result.micro_batches:
        prompts = prompts_of(micro_batch, longest)
        cached = sum(prompts) + sum(s.request.max_new_tokens for s in micro_batch)
        all_cached, all_prompts = all_cached + cached, all_prompts + sum(prompts)
        assert len(micro_batch) <= limits.micro_batch_size
        assert cached <= limits.micro_batch_cache_tokens
        assert limits.micro_batch_prompt_tokens is None or sum(prompts) <= limits.micro_batch_prompt_tokens
    assert limits.batch_size is None or sum(map(len, result.micro_batches)) <= limits.batch_size
    assert limits.cache_tokens is None or all_cached <= limits.cache_tokens
    assert limits.prompt_tokens is None or all_prompts <= limits.prompt_tokens


@given(cases())
def test_what_never_fits_is_what_passes_a_limit_alone(case):
    queue, limits, _ = case
    for sequence in queue:
        cached, prompt = prompt_and_generation(sequence.max_tokens), sequence.prompt_len
        longest = min(limits.micro_batch_prompt_tokens or 10**9, limits.prompt_tokens or 10**9)
        too_much = cached > min(limits.micro_batch_cache_tokens, limits.cache_tokens or 10**9)
        reason = never_fits(prompt, cached, limits)
        assert (reason is not None) == (prompt > longest or too_much)
        assert reason is None or str(prompt) in reason or str(cached) in reason


@settings(max_examples=200)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(1, 6))
def test_without_limits_loads_differ_by_at_most_one_prompt(prompts, num_micro_batches):
    """The bound of greedy balancing: when the heaviest took its last prompt it was the lightest."""
    limits = BatchLimits(num_micro_batches=num_micro_batches, micro_batch_size=1000, micro_batch_cache_tokens=10**9)
    result = batch_requests(Waiting.of(sequences(*[(p, 1) for p in prompts])), limits)
    loads = [sum(s.prompt_len for s in m) for m in result.micro_batches]
    loads += [0] * (num_micro_batches - len(loads))
    assert max(loads) - min(loads) <= max(prompts)
    assert sum(loads) == sum(prompts)


def test_the_lightest_is_the_one_with_the_fewest_prompt_tokens():
    """Whatever they will generate: 10 and 9 begin, 8 joins 9, and 7 joins 10 although that one caches the most."""
    limits = BatchLimits(num_micro_batches=2, micro_batch_size=9, micro_batch_cache_tokens=999)
    result = batch_requests(Waiting.of(sequences((10, 100), (9, 1), (8, 1), (7, 1))), limits)
    assert [[s.prompt_len for s in micro_batch] for micro_batch in result.micro_batches] == [[10, 7], [9, 8]]


def test_a_padded_prompt_takes_the_room_of_the_longest():
    """Of 25 tokens two padded prompts of 10 leave no room for a third, be it one of 5."""
    limits = BatchLimits(num_micro_batches=3, micro_batch_size=9, micro_batch_cache_tokens=999, prompt_tokens=25)
    result = batch_requests(Waiting.of(sequences((10, 1), (5, 1), (5, 1))), limits, padded=True)
    assert sum(len(micro_batch) for micro_batch in result.micro_batches) == 2
    assert len(batch_requests(Waiting.of(sequences((10, 1), (5, 1), (5, 1))), limits).aborted) == 0


def test_a_batch_by_hand():
    """Longest first, each to the lightest; at two requests a micro-batch is complete. 9 8 7 6 5 4: {9} {8}, 7 joins 8,
    6 joins 9; then both are full, and 5 and 4 wait for the next batch."""
    limits = BatchLimits(num_micro_batches=2, micro_batch_size=2, micro_batch_cache_tokens=100)
    result = batch_requests(Waiting.of(sequences((4, 3), (5, 3), (6, 3), (7, 3), (8, 3), (9, 3))), limits)
    assert [[s.prompt_len for s in m] for m in result.micro_batches] == [[8, 7], [9, 6]]
    assert [s.prompt_len for s in result.aborted.sequences] == [5, 4]


def test_the_last_partial_micro_batch_is_not_lost():
    limits = BatchLimits(num_micro_batches=2, micro_batch_size=3, micro_batch_cache_tokens=100)
    result = batch_requests(Waiting.of(sequences((9, 3), (2, 3), (2, 3))), limits)
    assert [[s.prompt_len for s in m] for m in result.micro_batches] == [[9], [2, 2]]


def test_padding_counts_every_prompt_as_the_longest():
    limits = BatchLimits(num_micro_batches=1, micro_batch_size=9, micro_batch_cache_tokens=36)
    queue = sequences((9, 3), (2, 3), (2, 3), (2, 3))
    assert [len(m) for m in batch_requests(Waiting.of(queue), limits).micro_batches] == [4]
    assert [len(m) for m in batch_requests(Waiting.of(queue), limits, padded=True).micro_batches] == [3]


@dataclass(frozen=True)
class Sizes:
    num_micro_batches: int
    micro_batch_size: int
    batch_size: int | None
    min_micro_batches: int
    padded: bool


sizes = st.builds(
    Sizes,
    num_micro_batches=st.integers(1, 5),
    micro_batch_size=st.integers(1, 5),
    batch_size=st.one_of(st.none(), st.integers(1, 12)),
    min_micro_batches=st.integers(1, 3),
    padded=st.booleans(),
)


@settings(max_examples=200)
@given(workloads(), sizes, st.integers(0, 30))
def test_the_scheduler_conserves_requests_and_blocks(load: Workload, limits: Sizes, device_blocks: int):
    """Also where a share of the blocks is on the device: a request lies wholly on one side."""
    on_device = min(device_blocks, load.num_blocks)
    kv, work = FakeKV(load.num_blocks, load.block_size, device_blocks=on_device), load.sequences()
    plans = []

    class Watched(BatchScheduler):
        def next_pass(self):
            plan = super().next_pass()
            if plan is not None:
                plans.append(plan)
            return plan

    scheduler = Watched(work, kv.allocator, micro_batch_prompt_tokens=load.max_pass_tokens, **vars(limits))
    record = drive(scheduler, kv, work, load)

    def never_fits(sequence: Sequence) -> bool:
        blocks = -(-sequence.max_tokens // load.block_size)
        return blocks > max(on_device, load.num_blocks - on_device) or sequence.prompt_len > load.max_pass_tokens

    check_conservation(record, load, never_fits)
    for plan in plans:
        assert plan.micro_batches is not None
        flat = [s for micro_batch in plan.micro_batches for s in micro_batch]
        assert flat == plan.sequences
        assert all(plan.micro_batches)
        assert len(plan.micro_batches) <= limits.num_micro_batches
        assert max(map(len, plan.micro_batches)) <= limits.micro_batch_size
        assert limits.batch_size is None or len(plan.sequences) <= limits.batch_size
        partitions = [{s.partition for s in micro_batch} for micro_batch in plan.micro_batches]
        assert all(len(numbers) == 1 for numbers in partitions), "a micro-batch has one KV partition"
        assert len(set.union(*partitions)) == len(partitions), "two micro-batches share a KV partition"
        assert not (plan.prefill and plan.decode), "phases are apart"


@settings(max_examples=200)
@given(workloads(), sizes)
def test_a_batch_takes_its_blocks_padding_included(load: Workload, limits: Sizes):
    kv, work = FakeKV(load.num_blocks, load.block_size), load.sequences()
    most = load.max_pass_tokens
    scheduler = BatchScheduler(work, kv.allocator, micro_batch_prompt_tokens=most, **vars(limits))
    plan = scheduler.next_pass()
    if plan is None:
        return
    assert plan.micro_batches is not None
    lens = [s.prompt_len for s in plan.prefill]
    assert [s.padding for s in plan.prefill] == [(max(lens) - one) * limits.padded for one in lens]
    for s in plan.prefill:
        assert len(s.blocks) == -(-(s.max_tokens + s.padding) // load.block_size)
    assert all(sum(s.prompt_len + s.padding for s in m) <= load.max_pass_tokens for m in plan.micro_batches)


def test_a_batch_decodes_to_its_end_before_the_next_begins():
    kv, work = FakeKV(100, 4), sequences((8, 3), (8, 5), (8, 2), (4, 2))
    scheduler = BatchScheduler(
        work, kv.allocator, num_micro_batches=3, micro_batch_size=1, micro_batch_prompt_tokens=20
    )
    seen = []
    while (plan := scheduler.next_pass()) is not None:
        assert plan.micro_batches is not None
        seen.append((plan.mode, [[s.request.request_id for s in m] for m in plan.micro_batches]))
        ended = [s for s in plan.sequences if s.accept(7, None)]
        for sequence in ended:
            sequence.state = State.FINISHED
            kv.release(sequence)
        scheduler.retire(plan, ended)
    batch = [("prefill", [[0], [1], [2]]), ("decode", [[0], [1], [2]]), ("decode", [[0], [1]]), ("decode", [[1]])]
    assert seen == [*batch, ("decode", [[1]]), ("prefill", [[3]]), ("decode", [[3]])]


@pytest.mark.parametrize(("requests", "micro_batches"), [(9, 3), (4, 2), (2, 2), (1, 1)])
def test_what_is_left_fills_no_more_micro_batches_than_it_needs(requests, micro_batches):
    kv = FakeKV(100, 4)
    scheduler = BatchScheduler(
        sequences(*[(5, 2)] * requests), kv.allocator,
        num_micro_batches=5, micro_batch_size=3, min_micro_batches=2, micro_batch_prompt_tokens=50,
    )  # fmt: skip
    plan = scheduler.next_pass()
    assert plan is not None and plan.micro_batches is not None
    assert len(plan.micro_batches) == micro_batches


@given(lengths=st.lists(st.integers(1, 400), min_size=1, max_size=120), micro_batch_size=st.integers(1, 12))
def test_a_batch_of_all_requests_leaves_none_over_for_its_length(lengths, micro_batch_size):
    """With the limits that a plan gives: mean requests, and one of the longest beside them."""
    queue = sequences(*((length, 16) for length in lengths))
    shape = WorkloadShape.of_sequences(queue, block_tokens=1)
    limits = BatchLimits(
        num_micro_batches=-(-len(queue) // micro_batch_size),
        micro_batch_size=micro_batch_size,
        batch_size=len(queue),
        micro_batch_cache_tokens=ceil(micro_batch_kv_tokens(shape, micro_batch_size)),
        micro_batch_prompt_tokens=ceil(shape.prompts_of(micro_batch_size) + shape.longest_prompt),
    )
    result = batch_requests(Waiting.of(queue), limits, cached_tokens=lambda num_tokens: num_tokens)
    assert not result.aborted
