"""Caches are replayed as the textbook has them, and Belady's optimum is the best of all, by trying everything."""

from __future__ import annotations

from functools import cache
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.memory.replacement import LeastFrequentlyUsed, LeastRecentlyUsed
from harness.study.caches import belady_hits, hits, hot_hits, steps_of
from harness.study.loads import loads_of
from tests.unit.study.texts import random_text, text_of

STEPS = st.lists(
    st.sets(st.tuples(st.integers(0, 1), st.integers(0, 3)), min_size=1, max_size=3).map(
        lambda keys: tuple(sorted(keys))
    ),
    min_size=1,
    max_size=7,
)
policies = pytest.mark.parametrize("policy", [LeastRecentlyUsed, LeastFrequentlyUsed])


def best_of_all(steps, capacity: int, *, cold: bool) -> int:
    """Try every content of the cache at the start and behind each step."""
    everything = sorted({key for step in steps for key in step})

    @cache
    def best(number: int, there: frozenset) -> int:
        if number == len(steps):
            return 0
        step = set(steps[number])
        pool = sorted(there | step)
        kept = combinations(pool, min(capacity, len(pool)))
        return len(there & step) + max(best(number + 1, frozenset(chosen)) for chosen in kept)

    starts = [()] if cold else combinations(everything, min(capacity, len(everything)))
    return max(best(0, frozenset(start)) for start in starts)


@pytest.mark.parametrize("cold", [True, False])
@settings(max_examples=120, deadline=None)
@given(steps=STEPS, capacity=st.integers(1, 5))
def test_the_optimum_is_the_best_of_all_decisions(cold, steps, capacity):
    assert belady_hits(steps, capacity, cold=cold) == best_of_all(steps, capacity, cold=cold)


@policies
@settings(max_examples=150, deadline=None)
@given(steps=st.lists(STEPS.map(lambda steps: steps[0]), max_size=40), warm_up=STEPS, capacity=st.integers(1, 9))
def test_no_policy_beats_the_optimum(policy, steps, warm_up, capacity):
    cold = hits(steps, capacity, policy())
    assert cold <= belady_hits(steps, capacity, cold=True)
    assert max(cold, hits(steps, capacity, policy(), warm_up)) <= belady_hits(steps, capacity)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 100), capacity=st.integers(1, 18))
def test_no_table_beats_the_optimum(seed, capacity):
    train, test = random_text(seed), random_text(seed + 1000)
    steps = steps_of(test, 2, 10)
    assert hot_hits(steps, capacity, train) <= belady_hits(steps, capacity)


def test_the_table_has_the_experts_that_were_chosen_most():
    train, test = random_text(1, lengths=(30, 30)), random_text(2)
    counts = loads_of(train).counts
    order = sorted(np.ndindex(counts.shape), key=lambda key: -counts[key])
    steps = steps_of(test, 1, 100)
    for capacity in (1, 4, 18):
        assert hot_hits(steps, capacity, train) == sum(key in order[:capacity] for step in steps for key in step)


@given(accesses=st.lists(st.integers(0, 5), max_size=60), capacity=st.integers(1, 6))
def test_single_accesses_are_those_of_the_textbooks_lru(accesses, capacity):
    found, stack = 0, []
    for expert in accesses:
        found += expert in stack[-capacity:]
        stack = [e for e in stack if e != expert] + [expert]
    assert hits([((0, expert),) for expert in accesses], capacity, LeastRecentlyUsed()) == found


def test_the_experts_of_a_step_that_are_there_go_first():
    """Else the first missing one would drive out what the step needs next: with two places, 0 and 1 stay useful."""
    steps = [((0, 1), (0, 2)), ((0, 0), (0, 1))]
    assert hits(steps, 2, LeastRecentlyUsed()) == 1
    assert hits(steps[1:], 2, LeastRecentlyUsed(), steps[:1]) == 1, "the warm-up's hits do not count, its content does"
    assert hits([*steps, ((0, 0),)], 1, LeastRecentlyUsed()) == 0, "of a step, the last one brought stays"


def test_steps_are_those_of_decode_passes():
    """Lanes take the requests in turn, passes go layer by layer, and an expert of two tokens is one access."""
    experts = [
        np.array([[[request * 2, 8], [position, 9]] for position in range(n)]) for request, n in enumerate((2, 1, 2))
    ]
    steps = steps_of(text_of(experts, 10), 2, 100)
    assert steps == [((0, 0), (0, 2), (0, 8)), ((1, 0), (1, 9))], "the second lane has one token"
    assert len(steps_of(text_of(experts, 10), 1, 100)) == 2 * 5
    assert steps_of(text_of(experts, 10), 1, 100)[4:6] == [((0, 2), (0, 8)), ((1, 0), (1, 9))]
    assert len(steps_of(text_of(experts, 10), 1, 3)) == 2 * 3
