"""Statistics of recorded routing against counts by plain loops, and against routing whose correlation is known."""

from __future__ import annotations

from itertools import permutations
from math import log2

import numpy as np
import pytest

from harness.study.correlation import (
    best_mapping,
    favourites_information,
    followed_shares,
    kept_share,
    kept_shares,
    mutual_information_bits,
    together,
)
from harness.study.fits import Shape, fit, likeness, sorted_loads, synthetic, zipf_loads
from harness.study.loads import drift, jensen_shannon_bits, loads_of, overlap, popularity, total_variation
from harness.study.recorded import Text
from tests.unit.study.texts import random_text, text_of


@pytest.mark.parametrize("lag", [1, 3])
def test_kept_shares_are_those_of_a_loop(lag):
    text, found = random_text(3), []
    for start, end in zip(text.starts[:-1], text.starts[1:], strict=True):
        for at in range(start + lag, end):
            pairs = zip(text.experts[at], text.experts[at - lag], strict=True)
            found.append([len(set(one.tolist()) & set(other.tolist())) / text.k for one, other in pairs])
    assert kept_share(text, lag) == pytest.approx(np.mean(found, axis=0))
    assert kept_share(text, 7) is None, "no request has so many tokens"
    half = np.arange(text.num_tokens) % 2 == 0
    assert kept_share(text, 1, half) != pytest.approx(kept_share(text, 1))


def test_independent_tokens_keep_what_is_said_for_them():
    text = synthetic(random_text(0, lengths=(4000,), num_experts=8), {"name": "skewed", "zipf_exponent": 1.5}, 0)
    found = kept_shares(text)
    for lag, kept in zip(found["lags"], found["kept"], strict=True):
        assert kept == pytest.approx(found["independent"], abs=0.02), lag


def test_the_best_mapping_is_the_best_of_all():
    counts = together(random_text(4, lengths=(200,), num_experts=5), 0)
    image = best_mapping(counts)
    assert sorted(image) == list(range(5))
    rows = range(5)
    best = max(counts[rows, order].sum() for order in map(list, permutations(rows)))
    assert counts[rows, image].sum() == best


def test_co_activations_and_followed_shares_are_counted():
    train, test = random_text(5, lengths=(40,)), random_text(6)
    counts = np.zeros((6, 6))
    for token in train.experts:
        for one in token[1]:
            for other in token[2]:
                counts[one, other] += 1
    assert together(train, 1) == pytest.approx(counts)
    image = best_mapping(counts)
    followed = [len({image[e] for e in token[1]} & set(token[2].tolist())) / 2 for token in test.experts]
    assert followed_shares(train, test)["followed"][1] == pytest.approx(np.mean(followed))


def test_information_is_that_of_the_definition():
    rng = np.random.default_rng(0)
    counts = rng.integers(0, 5, size=(4, 3)).astype(float)
    joint = counts / counts.sum()
    by_hand = sum(
        joint[i, j] * log2(joint[i, j] / (joint[i].sum() * joint[:, j].sum()))
        for i in range(4)
        for j in range(3)
        if joint[i, j] > 0
    )
    assert mutual_information_bits(counts) == pytest.approx(by_hand)


def test_a_favourite_that_follows_tells_all_and_independent_ones_nothing():
    rng = np.random.default_rng(1)
    first = rng.integers(0, 8, size=4000)
    experts = np.stack([np.stack([first, (first + 1) % 8], 1), np.stack([7 - first, (first + 3) % 8], 1)], axis=1)
    found = favourites_information(text_of([experts], 8))
    assert found["bits"][0] == pytest.approx(found["entropy_bits"][0]) == pytest.approx(3, abs=0.01)
    assert found["shuffled_bits"][0] < 0.02


def test_loads_drift_as_two_distributions_differ():
    one, other = np.array([[0.5, 0.5, 0.0]]), np.array([[0.0, 0.5, 0.5]])
    assert total_variation(one, other) == pytest.approx([0.5])
    assert jensen_shannon_bits(one, other) == pytest.approx([0.5])
    assert jensen_shannon_bits(one, one) == pytest.approx([0])
    assert overlap(np.array([[3, 1]]), np.array([[1, 2]])) == pytest.approx([0.5])


def test_popularity_is_that_of_the_counts():
    text = random_text(7, lengths=(50,), layers=2, num_experts=8)
    found, counts = popularity(text), np.zeros((2, 8))
    for token in text.experts:
        for layer in range(2):
            counts[layer, token[layer]] += 1
    assert np.array_equal(loads_of(text).counts, counts)
    shares = np.sort(counts, axis=1)[:, ::-1] / 100
    assert found["sorted_shares"] == pytest.approx(shares)
    assert found["hot_quarter_share"] == pytest.approx(shares[:, :2].sum(axis=1))
    assert found["busiest_over_mean"] == pytest.approx(shares[:, 0] * 8)


class Halves:
    """A domain of which only the two halves are asked for."""

    def __init__(self, train: Text, test: Text) -> None:
        self.train, self.test = train, test


def test_drift_compares_one_half_with_the_other():
    """Else a domain would be compared with itself, and look as if it never changed."""
    same = random_text(8, lengths=(60,))
    other = text_of([5 - same.experts], 6)
    found = drift({"a": Halves(same, same), "b": Halves(other, same)})
    assert found["total_variation"][0] == [0, 0]
    assert found["total_variation"][1][0] > 0.2 and found["hot_overlap"][1][0] < 1


def test_fits_find_the_settings_that_routing_was_drawn_by():
    """And with them come loads, kept and followed shares that are like the recorded ones."""
    asked = {"zipf_exponent": 0.8, "keep_token": 0.35, "follow_layer": 0.45}
    like = random_text(0, lengths=(700,) * 8, layers=5, num_experts=16, k=3)
    drawn = synthetic(like, {"name": "correlated", **asked}, seed=3)
    train, test = drawn.requests(np.arange(0, 8, 2)), drawn.requests(np.arange(1, 8, 2))
    found = fit(train, test)
    assert found == pytest.approx(asked, abs=0.05)
    again = synthetic(like, {"name": "correlated", **found}, seed=4)
    halves = again.requests(np.arange(0, 8, 2)), again.requests(np.arange(1, 8, 2))
    assert likeness(*halves) == pytest.approx(likeness(train, test), rel=0.1)


def test_independent_routing_fits_no_correlation():
    like = random_text(0, lengths=(800,) * 4, layers=4, num_experts=8)
    text = synthetic(like, {"name": "uniform"}, seed=0)
    found = fit(text.requests(np.array([0, 2])), text.requests(np.array([1, 3])))
    assert found["zipf_exponent"] < 0.1 and found["keep_token"] < 0.03 and found["follow_layer"] < 0.03


def test_zipf_loads_are_those_that_are_drawn():
    like = random_text(0, lengths=(6000,), layers=3, num_experts=8, k=2)
    text = synthetic(like, {"name": "skewed", "zipf_exponent": 1.0}, seed=1)
    assert sorted_loads(text) == pytest.approx(zipf_loads(1.0, 8, 2), abs=0.01)
    assert Shape(3, 8, 2).moe_layers == (0, 1, 2)
