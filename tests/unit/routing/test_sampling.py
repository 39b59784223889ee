"""Races against plain Python, and how often each expert wins against every possible order of arrival."""

from __future__ import annotations

import math
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.routing.counters import Stream, stream
from harness.routing.inclusion import inclusion, rates_for
from harness.routing.sampling import race
from tests.unit.routing.models import steady
from tests.unit.routing.test_counters import splitmix64


def slow_race(key: int, rates: list[float], k: int) -> list[int]:
    def arrival(expert: int) -> float:
        fraction = ((splitmix64(key, expert) >> 12) + 0.5) / 2**52
        return -math.log(fraction) / rates[expert] if rates[expert] else math.inf

    return sorted(range(len(rates)), key=arrival)[:k]


@steady
@given(
    key=st.integers(0, 2**64 - 1),
    rates=st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=20),
    idle=st.integers(0, 3),
    data=st.data(),
)
def test_a_race_is_won_by_the_first_arrivals(key, rates, idle, data):
    k = data.draw(st.integers(1, len(rates)))
    inverse = np.array([1 / rate for rate in rates] + [math.inf] * idle)
    rates = rates + [0.0] * idle
    chosen = race(np.array([key], dtype=np.uint64), len(rates), k, inverse)
    assert chosen.tolist() == [slow_race(key, rates, k)]


@steady
@given(key=st.integers(0, 2**64 - 1), num_experts=st.integers(1, 300), data=st.data())
def test_without_rates_the_smallest_numbers_win(key, num_experts, data):
    k = data.draw(st.integers(1, num_experts))
    numbers = [splitmix64(key, expert) for expert in range(num_experts)]
    expected = sorted(range(num_experts), key=numbers.__getitem__)[:k]
    assert race(np.array([key], dtype=np.uint64), num_experts, k).tolist() == [expected]


def first_k(rates: list[float], k: int) -> np.ndarray:
    """Inclusion by drawing one after another without replacement: every order, with its probability."""
    included = np.zeros(len(rates))
    for order in permutations(range(len(rates)), k):
        left, probability = sum(rates), 1.0
        for expert in order:
            probability *= rates[expert] / left
            left -= rates[expert]
        included[list(order)] += probability
    return included


@settings(steady, max_examples=50)
@given(rates=st.lists(st.floats(1e-4, 1.0), min_size=2, max_size=6), data=st.data())
def test_inclusion_is_that_of_drawing_without_replacement(rates, data):
    k = data.draw(st.integers(1, len(rates)))
    assert inclusion(np.array(rates), k) == pytest.approx(first_k(rates, k), abs=1e-7)


@settings(steady, max_examples=40)
@given(
    weights=st.lists(st.floats(0.0, 1.0), min_size=4, max_size=24).filter(lambda w: sum(x > 0.01 for x in w) >= 4),
    k=st.integers(1, 3),
)
def test_rates_give_the_asked_shares(weights, k):
    shares = np.array(weights) / sum(weights)
    while shares.max() > 0.98 / k:  # no expert can have more than 1 / k
        shares = np.minimum(shares, 0.97 / k)
        shares[shares > 0] += 1e-3
        shares /= shares.sum()
    rates = rates_for(shares, k)
    assert (rates[shares == 0] == 0).all()
    assert inclusion(rates, k) / k == pytest.approx(shares, abs=2e-5)


def test_an_expert_may_be_always_chosen():
    shares = np.array([0.5, 0.3, 0.1, 0.1])
    assert inclusion(rates_for(shares, 2), 2) == pytest.approx(2 * shares, abs=1e-4)


@pytest.mark.parametrize(("num_experts", "k", "exponent"), [(8, 2, 0.0), (8, 2, 1.0), (64, 6, 0.7), (128, 8, 2.0)])
def test_races_are_won_as_often_as_computed(num_experts, k, exponent):
    inverse = np.arange(1, num_experts + 1.0) ** exponent
    draws = 20_000
    chosen = race(stream(3, Stream.EXPERTS, np.arange(draws)), num_experts, k, inverse)
    expected = inclusion(1 / inverse, k)
    spread = np.sqrt(expected * (1 - expected) / draws) + 1e-12
    deviation = (np.bincount(chosen.ravel(), minlength=num_experts) / draws - expected) / spread
    assert np.abs(deviation).max() < 4.5
    favourites = np.bincount(chosen[:, 0], minlength=num_experts) / draws  # the first is drawn by the rates themselves
    share = (1 / inverse) / (1 / inverse).sum()
    assert np.abs((favourites - share) / np.sqrt(share / draws)).max() < 4.5
