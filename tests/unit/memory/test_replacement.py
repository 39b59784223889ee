"""Cache policies choose as the textbook says, whatever may be chosen, and ExpertSlots counts hits by them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.memory.expert_slots import ExpertSlots, Key
from harness.memory.replacement import LeastFrequentlyUsed, LeastRecentlyUsed, LowestRecentScore
from harness.memory.weights import WeightStore
from tests.unit.memory.parts import NUM_LAYERS, FakeSource, machine

KEYS = [(layer, expert) for layer in range(3) for expert in range(4)]
EXPERTS = (0, 1, 10)  # of `FakeSource`


def longest_ago(history: list[Key], key: Key) -> int:
    return max(at for at, used in enumerate(history) if used == key)


def oldest(history: list[Key], candidates: list[Key]) -> Key:
    return min(candidates, key=lambda key: longest_ago(history, key))


def rarest(history: list[Key], candidates: list[Key]) -> Key:
    return min(candidates, key=lambda key: (history.count(key), longest_ago(history, key)))


@settings(max_examples=200)
@given(rng=st.randoms(use_true_random=True))
def test_the_lowest_score_goes_whatever_was_scored_or_held_since(rng):
    """Scores of a layer change together, also those of experts that are held, or that are not there."""
    tested, history, there, scores = LowestRecentScore(0.5), [], set(), dict.fromkeys(KEYS, 0.0)
    for _ in range(rng.randint(1, 60)):
        if rng.random() < 0.4:
            layer, given_scores = rng.randrange(3), np.array([rng.choice([0, 0, 0.25, 0.5]) for _ in range(4)])
            tested.scored(layer, given_scores)
            for expert in range(4):
                scores[layer, expert] = 0.5 * given_scores[expert] + 0.5 * scores[layer, expert]
        key = rng.choice(KEYS)
        history.append(key)
        there.add(key)
        tested.used(key)
        if rng.random() < 0.5:
            there -= set(rng.choices(KEYS, k=rng.randint(0, 2)))
        candidates = sorted(key for key in there if rng.random() < 0.5)
        if candidates:
            chosen = tested.victim(candidates, key)
            assert chosen == min(candidates, key=lambda key: (scores[key], longest_ago(history, key)))
            there.remove(chosen)


POLICIES = [(LeastRecentlyUsed, oldest), (LeastFrequentlyUsed, rarest)]


@pytest.mark.parametrize(("policy", "by_definition"), POLICIES, ids=["lru", "lfu"])
@settings(max_examples=200)
@given(rng=st.randoms(use_true_random=True))
def test_victims_are_those_of_the_definition(policy, by_definition, rng):
    """Among any candidates, in any collection, with evictions of which the policy hears nothing. Hypothesis draws the
    seed only: thousands of draws a case would take it seconds."""
    tested, history, there = policy(), [], set()
    for _ in range(rng.randint(1, 60)):
        key = rng.choice(KEYS)
        history.append(key)
        there.add(key)
        tested.used(key)
        if rng.random() < 0.5:
            there -= set(rng.choices(KEYS, k=rng.randint(0, 2)))  # evicted by the strategy itself
        candidates = sorted(key for key in there if rng.random() < 0.5)
        if candidates:
            given_as = rng.choice([list, set, lambda keys: dict.fromkeys(keys).keys()])
            chosen = tested.victim(given_as(candidates), key)
            assert chosen == by_definition(history, candidates)
            there.remove(chosen)


def test_counts_outlive_evictions():
    """What was popular stays so when it comes back, and the queue of uses does not grow with their number."""
    policy = LeastFrequentlyUsed()
    for _ in range(5000):
        policy.used((0, 0))
    assert policy.victim([(0, 0)], (0, 1)) == (0, 0)
    for key in ((0, 1), (0, 1), (0, 0)):
        policy.used(key)
    assert policy.victim([(0, 0), (0, 1)], (0, 2)) == (0, 1)
    assert len(policy._queue) < 100


@pytest.mark.parametrize(("policy", "hits"), [(LeastRecentlyUsed, 2), (LeastFrequentlyUsed, 4)], ids=["lru", "lfu"])
def test_expert_slots_keep_what_the_policy_keeps(policy, hits):
    """One expert is used between others: the least recently used one goes, or it stays as the most popular."""
    device = machine(0, poison=False)
    slots = ExpertSlots(device, WeightStore(device, FakeSource()), num_slots=2, packet_bytes=64, replacement=policy())
    last = NUM_LAYERS - 1
    for key in ((0, 0), (0, 0), (0, 0), (0, 1), (1, 0), (0, 0), (0, 10), (last, 1), (0, 0)):
        slots.acquire(*key)
        slots.release(*key)
    assert slots.hits == hits
