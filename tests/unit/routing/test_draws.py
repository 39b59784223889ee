"""Draws against plain Python, and how often each expert is drawn against every possible order."""

from __future__ import annotations

from fractions import Fraction
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.routing.counters import Stream, stream
from harness.routing.inclusion import inclusion, weights_for
from kernels.routing import draw
from tests.unit.routing.models import steady
from tests.unit.routing.test_counters import splitmix64


def drawn_by_hand(key: int, weights: list[int], k: int) -> list[int]:
    """Lay out what is left in one line of exact length, the last column first, and take what lies at the fraction."""
    left, found = list(range(len(weights)))[::-1], []
    for i in range(k):
        at = (Fraction(splitmix64(key, i) >> 12) + Fraction(1, 2)) / 2**52 * sum(weights[column] for column in left)
        for column in left:
            at -= weights[column]
            if at <= 0:
                break
        found.append(column)
        left.remove(column)
    return found


@steady
@given(
    key=st.integers(0, 2**64 - 1), weights=st.lists(st.integers(0, 1000), min_size=1, max_size=40).filter(any),
    in_order=st.booleans(), data=st.data(),
)  # fmt: skip
def test_draws_by_weight_are_those_of_exact_fractions(key, weights, in_order, data):
    weights = sorted(weights, reverse=True) if in_order else weights
    k = data.draw(st.integers(1, sum(weight > 0 for weight in weights)))
    drawn = draw(np.array([key], dtype=np.uint64), len(weights), k, np.array(weights, dtype=np.float64))
    assert drawn.tolist() == [drawn_by_hand(key, weights, k)]


@steady
@given(
    key=st.integers(0, 2**64 - 1), heavy=st.integers(1, 5), light=st.integers(1, 5), light_weight=st.floats(0, 1e-290)
)
def test_what_rounding_swallows_is_drawn_last(key, heavy, light, light_weight):
    weights = np.array([*[1e10, 3.0, 1.0, 0.1, 1e-9][:heavy], *[light_weight] * light])
    k = heavy + (light if light_weight else 0)
    (drawn,) = draw(np.array([key], dtype=np.uint64), len(weights), k, weights).tolist()
    assert sorted(drawn[:heavy]) == list(range(heavy)) and sorted(drawn) == list(range(k))


@steady
@given(keys=st.lists(st.integers(0, 2**64 - 1), max_size=5), num_experts=st.integers(1, 300), data=st.data())
def test_even_draws_deal_from_a_deck(keys, num_experts, data):
    k = data.draw(st.integers(1, num_experts))
    expected = []
    for key in keys:
        deck = list(range(num_experts))
        for i in range(k):
            at = i + splitmix64(key, i) * (num_experts - i) // 2**64
            deck[i], deck[at] = deck[at], deck[i]
        expected.append(deck[:k])
    assert draw(np.array(keys, dtype=np.uint64), num_experts, k).tolist() == expected


@pytest.mark.parametrize(
    ("k", "weights", "told"),
    [
        (0, None, "k must lie between 1 and the 3 columns, got 0"),
        (4, None, "k must lie between 1 and the 3 columns, got 4"),
        (1, [1, 1], "weights must be one for each of 3 columns"),
        (2, [0, 1, 0], "weights must be above 0 for 2 columns or more, got 1"),
        (3, [1e-20, 1, 1], "weights must be above 0 for 3 columns or more, got 2"),
        (1, [1, -1, 1], "weights must be finite and >= 0"),
        (1, [1, np.inf, 1], "weights must be finite and >= 0"),
        (1, [1, np.nan, 1], "weights must be finite and >= 0"),
    ],
)
def test_a_draw_that_cannot_be_is_refused(k, weights, told):
    with pytest.raises(ValueError, match=told):
        draw(np.arange(2, dtype=np.uint64), 3, k, None if weights is None else np.array(weights, dtype=np.float64))


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
def test_weights_give_the_asked_shares(weights, k):
    shares = np.array(weights) / sum(weights)
    while shares.max() > 0.98 / k:  # no expert can have more than 1 / k
        shares = np.minimum(shares, 0.97 / k)
        shares[shares > 0] += 1e-3
        shares /= shares.sum()
    found = weights_for(shares, k)
    assert (found[shares == 0] == 0).all()
    assert inclusion(found, k) / k == pytest.approx(shares, abs=2e-5)


def test_an_expert_may_be_always_chosen():
    shares = np.array([0.5, 0.3, 0.1, 0.1])
    assert inclusion(weights_for(shares, 2), 2) == pytest.approx(2 * shares, abs=1e-4)


@pytest.mark.parametrize("exponent", [None, 0.0, 0.7, 1.0, 2.0])
@pytest.mark.parametrize(("num_experts", "k"), [(8, 2), (64, 6), (128, 8)])
def test_experts_are_drawn_as_often_as_computed(num_experts, k, exponent):
    weights = np.arange(1, num_experts + 1.0) ** -(exponent or 0.0)
    draws = 20_000
    keys = stream(3, Stream.EXPERTS, np.arange(draws))
    drawn = draw(keys, num_experts, k, None if exponent is None else weights)
    expected = inclusion(weights, k)
    spread = np.sqrt(expected * (1 - expected) / draws) + 1e-12
    deviation = (np.bincount(drawn.ravel(), minlength=num_experts) / draws - expected) / spread
    assert np.abs(deviation).max() < 4.5
    favourites = np.bincount(drawn[:, 0], minlength=num_experts) / draws  # the first is drawn by the weights themselves
    share = weights / weights.sum()
    assert np.abs((favourites - share) / np.sqrt(share / draws)).max() < 4.5


def test_every_order_of_even_draws_is_as_frequent():
    drawn = draw(stream(5, Stream.EXPERTS, np.arange(30_000)), 6, 3)
    counts = np.unique(drawn, axis=0, return_counts=True)[1]
    assert len(counts) == 120
    chi_square = ((counts - 250) ** 2 / 250).sum()
    assert 80 < chi_square < 170, "119 on average, with a standard deviation of 15"
