"""ARC replays its published pseudocode, scores and foresight choose as defined, and layers keep to their places."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.memory.expert_slots import Key
from harness.memory.replacement import (
    AdaptiveReplacement,
    ByLayer,
    FarthestNextUse,
    LeastFrequentlyUsed,
    LeastRecentlyUsed,
    LowestRecentScore,
)
from harness.study.caches import belady_hits, hits

EXPERTS = st.lists(st.integers(0, 7), max_size=80)
KEYS = st.tuples(st.integers(0, 2), st.integers(0, 3))
STEPS = st.lists(st.sets(KEYS, min_size=1, max_size=4).map(lambda keys: tuple(sorted(keys))), max_size=40)


class Arc:
    """Follows Figure 4 of Megiddo and Modha line by line: lists with the most recent last, and no protocol."""

    def __init__(self, c: int) -> None:
        self.c, self.p = c, 0.0
        self.t1: list[int] = []
        self.t2: list[int] = []
        self.b1: list[int] = []
        self.b2: list[int] = []

    def replace(self, x: int) -> None:
        if self.t1 and ((x in self.b2 and len(self.t1) == self.p) or len(self.t1) > self.p):
            self.b1.append(self.t1.pop(0))
        else:
            self.b2.append(self.t2.pop(0))

    def access(self, x: int) -> bool:
        if x in self.t1 or x in self.t2:  # case I
            (self.t1 if x in self.t1 else self.t2).remove(x)
            self.t2.append(x)
            return True
        if x in self.b1:  # case II
            self.p = min(self.c, self.p + max(len(self.b2) / len(self.b1), 1))
            self.replace(x)
            self.b1.remove(x)
            self.t2.append(x)
        elif x in self.b2:  # case III
            self.p = max(0, self.p - max(len(self.b1) / len(self.b2), 1))
            self.replace(x)
            self.b2.remove(x)
            self.t2.append(x)
        else:  # case IV
            total = len(self.t1) + len(self.t2) + len(self.b1) + len(self.b2)
            if len(self.t1) + len(self.b1) == self.c:
                if len(self.t1) < self.c:
                    self.b1.pop(0)
                    self.replace(x)
                else:
                    self.t1.pop(0)
            elif total >= self.c:
                if total == 2 * self.c:
                    self.b2.pop(0)
                self.replace(x)
            self.t1.append(x)
        return False


@pytest.mark.parametrize("places", [1, 2, 5, 8])
def test_arc_keeps_what_its_pseudocode_keeps(places):
    """What is popular drifts, so that the lists of the evicted are met in every way."""
    rng = np.random.default_rng(places)
    popular = np.repeat(rng.integers(0, 2 * places, 40), 50)
    accesses = np.where(rng.random(2000) < 0.5, popular + rng.integers(0, 4, 2000), rng.integers(0, 3 * places, 2000))
    textbook, policy, there = Arc(places), AdaptiveReplacement(places), set()
    for expert in accesses.tolist():
        key = (0, expert)
        assert textbook.access(expert) == (key in there)
        if key not in there:
            if len(there) == places:
                there.remove(policy.victim(there, key))
            there.add(key)
        policy.used(key)
        assert there == {(0, kept) for kept in textbook.t1 + textbook.t2}


@settings(max_examples=100, deadline=None)
@given(data=st.data(), places=st.integers(1, 4))
def test_arc_chooses_one_of_the_candidates_whatever_left(data, places):
    """Some are held, and some leave without being chosen; no list grows beyond the directory."""
    policy, there = AdaptiveReplacement(places), set()
    for expert in data.draw(EXPERTS):
        key = (0, expert)
        if key not in there and len(there) == places:
            candidates = sorted(there)[data.draw(st.integers(0, places - 1)) :]
            chosen = policy.victim(candidates, key)
            assert chosen in candidates
            there.remove(chosen)
        there.add(key)
        policy.used(key)
        if data.draw(st.booleans()):
            for gone in data.draw(st.lists(st.sampled_from(sorted(there)), max_size=1)):
                there.remove(gone)
                policy.lost(gone)
        assert there == {*policy._once, *policy._often}
        assert sum(map(len, (policy._once, policy._often, policy._once_gone, policy._often_gone))) <= 8
        assert len(policy._once_gone) <= places and len(policy._often_gone) <= 2 * places


@settings(max_examples=40, deadline=None)
@given(
    passes=st.lists(st.tuples(st.integers(0, 2), st.lists(st.floats(0, 1), min_size=4, max_size=4)), max_size=8),
    weight=st.floats(0.1, 1),
)
def test_the_lowest_recent_score_goes(passes, weight):
    """By the closed form of the average: each score counts with weight times (1 - weight) to the passes since."""
    policy = LowestRecentScore(weight)
    keys = [(layer, expert) for layer in range(3) for expert in range(4)]
    for key in keys:
        policy.used(key)
    for layer, scores in passes:
        policy.scored(layer, np.array(scores))

    def score(key: Key) -> float:
        of_layer = [scores[key[1]] for layer, scores in passes if layer == key[0]]
        return sum(weight * (1 - weight) ** ago * value for ago, value in enumerate(reversed(of_layer)))

    lowest = min(map(score, keys))
    chosen = policy.victim(set(keys), (9, 9))
    assert abs(score(chosen) - lowest) < 1e-9
    if not passes:
        assert chosen == keys[0], "of equal ones, the one used longest ago"


@settings(max_examples=100, deadline=None)
@given(rng=st.randoms(use_true_random=True), sizes=st.lists(st.integers(1, 3), min_size=2, max_size=4))
def test_the_layer_gives_up_that_has_most_beyond_its_places(rng, sizes):
    """Some are held, and some leave without being chosen."""
    policy, there = ByLayer(dict(enumerate(sizes)), lambda _: LeastRecentlyUsed()), []
    for _ in range(40):
        key = (rng.randrange(len(sizes)), rng.randrange(6))
        candidates = [other for other in there if rng.random() < 0.8]
        if key not in there and len(there) >= sum(sizes) and candidates:
            surplus = {layer: sum(other[0] == layer for other in there) - sizes[layer] for layer in range(len(sizes))}
            chosen = policy.victim(candidates, key)
            possible = {other[0] for other in candidates}
            best = max(possible, key=lambda layer: (surplus[layer], -layer))
            own_first = surplus[best] <= 0 and key[0] in possible
            assert chosen[0] == (key[0] if own_first else best)
            assert chosen == next(other for other in there if other in candidates and other[0] == chosen[0])
            there.remove(chosen)
        there = [*(other for other in there if other != key), key]
        policy.used(key)
        if rng.random() < 0.2:
            policy.lost(there.pop(0))


def policies(steps, places):
    by_layer = ByLayer({layer: places for layer in range(3)}, AdaptiveReplacement)
    return [LeastRecentlyUsed(), LeastFrequentlyUsed(), AdaptiveReplacement(places), LowestRecentScore(0.5), by_layer]


@settings(max_examples=150, deadline=None)
@given(steps=STEPS, places=st.integers(1, 8))
def test_no_policy_has_more_hits_than_the_bound(steps, places):
    """Each brings what misses into the cache, foresight too; the bound may let it pass by."""
    bound = belady_hits(steps, places, cold=True)
    for policy in (FarthestNextUse(steps), *policies(steps, places)):
        assert hits(steps, places, policy) <= bound, type(policy).__name__


def test_foresight_that_must_bring_what_misses_is_no_bound():
    """Three experts are needed together in two places: whichever goes, recency is luckier here."""
    steps = [tuple((0, expert) for expert in step) for step in ((0, 1, 2), (0, 1, 2), (0, 2))]
    assert (
        hits(steps, 2, FarthestNextUse(steps)) < hits(steps, 2, LeastRecentlyUsed()) <= belady_hits(steps, 2, cold=True)
    )


@settings(max_examples=50, deadline=None)
@given(accesses=EXPERTS, sizes=st.tuples(st.integers(1, 3), st.integers(1, 3)))
def test_layers_with_places_of_their_own_are_caches_of_their_own(accesses, sizes):
    """Full from the start, one cache of two layers has the hits of two caches."""
    keys = [(expert % 2, expert) for expert in accesses]
    fill = [(layer, 100 + number) for layer in range(2) for number in range(sizes[layer])]
    steps = [(key,) for key in (*fill, *keys)]
    whole = hits(steps, sum(sizes), ByLayer(dict(enumerate(sizes)), lambda _: LeastRecentlyUsed()))
    apart = sum(
        hits([(key,) for key in (*fill, *keys) if key[0] == layer], sizes[layer], LeastRecentlyUsed())
        for layer in range(2)
    )
    assert whole == apart


def test_a_layer_that_took_more_than_its_places_gives_them_up_first():
    policy = ByLayer({0: 1, 1: 2}, lambda _: LeastRecentlyUsed())
    for expert in range(3):
        policy.used((0, expert))
    assert policy.victim([(0, 0), (0, 1), (0, 2)], (1, 0)) == (0, 0)
    policy.used((1, 0))
    assert policy.victim([(0, 1), (0, 2), (1, 0)], (1, 1)) == (0, 1)
    policy.used((1, 1))
    assert policy.victim([(0, 2), (1, 0), (1, 1)], (1, 2)) == (1, 0)
    policy.used((1, 2))
    assert policy.victim([(1, 1), (1, 2)], (0, 3)) == (1, 1), "its own expert is held"
