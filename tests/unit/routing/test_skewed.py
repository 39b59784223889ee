"""Loads come out as asked, layer by layer; files that cannot be used are answered with what is valid."""

from __future__ import annotations

import json

import numpy as np
import pytest

from harness.config import ConfigError
from harness.routing.build import build_routing
from harness.routing.inclusion import inclusion
from harness.routing.popularity import read_shares, write_shares
from harness.routing.statistics import all_tokens, load_statistics
from tests.unit.routing.models import Model

MODEL = Model(num_layers=4, num_experts=16, experts_per_token=4, num_dense_layers=1)
TOKENS = all_tokens(40, 500)


def counts(values, model=MODEL, seed=0):
    routing = build_routing(values, model, seed)
    return load_statistics(routing, model.moe_layers, TOKENS, num_experts=model.num_experts)


def assert_probable(found: np.ndarray, expected: np.ndarray, draws: int) -> None:
    """Chosen `found` times in so many draws, each with probability `expected`."""
    spread = np.sqrt(draws * expected * (1 - expected)) + 1e-9
    assert np.abs((found - draws * expected) / spread).max() < 4.5


def test_uniform_loads_are_equal():
    assert_probable(counts({"name": "uniform"}).counts, np.full((3, 16), 4 / 16), len(TOKENS[0]))


@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.5])
def test_a_zipf_law_holds_in_every_layer_for_other_experts(exponent):
    load = counts({"name": "skewed", "zipf_exponent": exponent})
    expected = inclusion(np.arange(1.0, 17.0) ** -exponent, 4)
    if exponent:
        assert len({tuple(row) for row in load.hottest(4).tolist()}) == 3
        assert_probable(-np.sort(-load.counts, axis=1), np.tile(expected, (3, 1)), len(TOKENS[0]))
    else:
        assert_probable(load.counts, np.tile(expected, (3, 1)), len(TOKENS[0]))


def test_who_is_popular_belongs_to_the_model_and_not_to_the_run():
    one = counts({"name": "skewed", "zipf_exponent": 1.5}, seed=1)
    two = counts({"name": "skewed", "zipf_exponent": 1.5}, seed=2)
    other = counts({"name": "skewed", "zipf_exponent": 1.5, "model_seed": 1}, seed=1)
    assert (one.hottest(3) == two.hottest(3)).all()
    assert not (one.counts == two.counts).all()
    assert not (one.hottest(3) == other.hottest(3)).all()


def test_given_shares_come_out(tmp_path):
    shares = np.random.default_rng(4).dirichlet(np.full(16, 2.0), size=3)
    shares[0, 5] = shares[1, 2] = 0.0
    shares = np.minimum(shares / shares.sum(axis=1, keepdims=True), 0.2)
    shares /= shares.sum(axis=1, keepdims=True)
    write_shares(tmp_path / "shares.json", shares * 1000, "a test")
    load = counts({"name": "skewed", "distributions": str(tmp_path / "shares.json")})
    assert_probable(load.counts, 4 * shares, len(TOKENS[0]))
    assert load.counts[0, 5] == load.counts[1, 2] == 0


def test_measured_shares_are_imitated(tmp_path):
    """What statistics of one routing say, another routing made from them does."""
    measured = counts({"name": "skewed", "zipf_exponent": 1.0})
    write_shares(tmp_path / "measured.json", measured.counts, "measured")
    imitated = counts({"name": "skewed", "distributions": str(tmp_path / "measured.json")}, seed=9)
    assert np.abs(imitated.shares - measured.shares).max() < 0.005
    assert read_shares(tmp_path / "measured.json", MODEL)[1] == pytest.approx(measured.shares)


GOOD = {"format": "moe-expert-shares", "version": 1, "source": "x", "shares": [[1.0] * 16] * 3}
LOPSIDED = [[9.0, *[1.0] * 15]] * 3


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"format": "other"}, '"format": "moe-expert-shares"'),
        ({"version": 2}, '"version": 1'),
        ({"source": None}, '"source"'),
        ({"shares": [[1.0] * 16] * 2}, r"[layers, experts] = [3, 16], got (2, 16)"),
        ({"shares": [[1.0] * 16, [1.0]]}, "[layers, experts] = [3, 16]"),
        ({"shares": "all"}, "[layers, experts] = [3, 16]"),
        ({"shares": [[1.0] * 16, [1.0] * 16, [-1.0] * 16]}, "'shares' of layer 3 must be finite and >= 0"),
        ({"shares": [[1.0] * 16, [float("nan")] * 16, [1.0] * 16]}, "'shares' of layer 2 must be finite"),
        ({"shares": [[1.0] * 3 + [0.0] * 13] * 3}, "at least 4 must be > 0, got 3"),
        ({"shares": LOPSIDED}, "'shares' of layer 1: none may exceed 1/4"),
    ],
)
def test_files_that_cannot_be_used(tmp_path, change, told):
    path = tmp_path / "shares.json"
    path.write_text(json.dumps(GOOD | change))
    with pytest.raises(ConfigError) as caught:
        build_routing({"name": "skewed", "distributions": str(path)}, MODEL, 0)
    assert caught.value.field == "routing.distributions"
    assert told in str(caught.value) and str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", ["", "[1, 2]", "{", None])
def test_files_that_are_not_shares_at_all(tmp_path, content):
    path = tmp_path / "shares.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match="shares.json"):
        build_routing({"name": "skewed", "distributions": str(path)}, MODEL, 0)
