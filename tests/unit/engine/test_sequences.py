"""What a sequence feeds next, over any interleaving of prefill, decode, preemption and end."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.engine.sequences import Sequence, State
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
