"""What a sequence feeds next, over any interleaving of prefill, decode, preemption and end."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.engine.sequences import Sequence, State, accept, num_tokens, without_room
from harness.memory.kv_cache import BlockAllocator
from harness.workload.request import Request


def sequence(prompt: tuple[int, ...], max_new_tokens: int) -> Sequence:
    return Sequence(Request(request_id=3, prompt_ids=prompt, max_new_tokens=max_new_tokens, text=None))


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.lists(st.booleans(), min_size=1, max_size=12))
def test_every_token_is_fed_exactly_once_in_each_life(prompt, preempts):
    """Oracle: the whole text so far, cut where the cache ends."""
    one, allocator = sequence(tuple(prompt), len(preempts)), BlockAllocator(50, 4)
    text = list(prompt)
    for number, preempted in enumerate(preempts):
        assert list(one.pending_ids()) == text[one.num_cached :]
        assert len(one.pending_ids()) == (1 if one.num_cached else len(text))
        assert one.num_tokens == len(text)
        assert one.num_tokens <= one.max_tokens
        allocator.grow(one, one.num_tokens)
        one.state = State.DECODING if one.num_cached else State.PREFILL
        assert one.accept(100 + number, None) == (number + 1 == len(preempts))
        assert one.num_cached == len(text)
        text.append(100 + number)
        if preempted:
            allocator.release(one)
    assert one.generated == text[len(prompt) :]
    assert max(one.num_cached, one.num_tokens - 1) == one.max_tokens, "the last token is never fed back"


def test_the_end_token_ends_a_sequence_where_it_is_asked_for():
    for eos, ends in ((5, True), (None, False), (6, False)):
        one = sequence((1, 2), 4)
        one.state = State.PREFILL
        assert one.accept(5, eos) is ends
        assert one.generated == [5]


@pytest.mark.parametrize("state", [State.QUEUED, State.PREEMPTED, State.FINISHED, State.REJECTED])
def test_only_a_running_sequence_takes_a_token(state):
    one = sequence((1,), 4)
    one.state = state
    with pytest.raises(AssertionError, match="request 3 was not running"):
        one.accept(5, None)


@given(
    prompts_and_new=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 4)), max_size=6),
    tokens=st.lists(st.lists(st.integers(0, 3), min_size=6, max_size=6), min_size=1, max_size=4),
    eos=st.sampled_from((None, 2)),
)
def test_many_sequences_take_tokens_as_each_would_alone(prompts_and_new, tokens, eos):
    """Oracle: a walk over the sequences, one token at a time."""
    running = [sequence((7,) * prompt, new) for prompt, new in prompts_and_new]
    for one in running:
        one.state = State.PREFILL
    for row in tokens:
        before = [(one, list(one.generated), one.num_tokens) for one in running]
        assert num_tokens(running).tolist() == [count for _, _, count in before]
        ended = accept(tuple(running), row[: len(running)], eos)
        for (one, generated, count), token in zip(before, row, strict=False):
            assert (one.generated, one.num_cached, one.state) == ([*generated, token], count, State.DECODING)
            assert (one in ended) == (token == eos or len(one.generated) == one.request.max_new_tokens)
        running = [one for one in running if one not in ended]


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), max_size=8), st.sampled_from((1, 3, 4)))
def test_who_lacks_room_is_who_misses_blocks(prompts_and_held, block_size):
    allocator, some = BlockAllocator(100, block_size), []
    for prompt, held in prompts_and_held:
        some.append(sequence((7,) * prompt, 4))
        allocator.grow(some[-1], held)
    lacking = [one for one in some if allocator.missing_blocks(one, one.num_tokens)]
    assert without_room(some, block_size) == lacking
