"""Tokens keep and layers follow as often as asked, and the loads stay what they were."""

from __future__ import annotations

import numpy as np
import pytest

from harness.config import parse
from harness.routing.build import build_routing
from harness.routing.inclusion import inclusion
from harness.routing.kinds.correlated import Config
from harness.routing.popularity import popularity, write_shares
from harness.routing.statistics import all_tokens, load_statistics
from tests.unit.routing.models import Model

MODEL = Model(num_layers=7, num_experts=64, experts_per_token=6, num_dense_layers=1)
REQUESTS, POSITIONS = 60, 400
TOKENS = all_tokens(REQUESTS, POSITIONS)


def routed(**values) -> np.ndarray:
    """[requests, positions, layers, k]"""
    routing = build_routing({"name": "correlated", **values}, MODEL, seed=3)
    layers = [routing.experts(*TOKENS, layer) for layer in MODEL.moe_layers]
    return np.stack(layers, axis=1).reshape(REQUESTS, POSITIONS, len(layers), -1)


def kept(experts: np.ndarray) -> np.ndarray:
    """[requests, positions - 1, layers]: whether a token has the experts of the one before. By chance 1e-10."""
    return (experts[:, 1:] == experts[:, :-1]).all(axis=-1)


def mapping(values) -> np.ndarray:
    """[layers - 1, experts]: what each expert is mapped to, read off a routing that always follows."""
    always = routed(**{**values, "keep_token": 0.0, "follow_layer": 1.0})
    images = np.full((len(MODEL.moe_layers) - 1, MODEL.num_experts), -1)
    for layer in range(len(images)):
        images[layer, always[:, :, layer].ravel()] = always[:, :, layer + 1].ravel()
    return images


@pytest.mark.parametrize("zipf", [0.0, 0.6])
@pytest.mark.parametrize("keep", [0.0, 0.3, 0.9])
@pytest.mark.parametrize("follow", [0.0, 0.5, 1.0])
def test_both_correlations_come_out_together(keep, follow, zipf):
    values = {"keep_token": keep, "follow_layer": follow, "lookback": 32, "zipf_exponent": zipf}
    experts = routed(**values)
    keeps = kept(experts)
    # Independent draws would have a standard error of 0.0032; the certain renewals make it smaller.
    assert keeps.mean(axis=(0, 1)) == pytest.approx(np.full(6, keep), abs=0.015)
    assert (keeps == keeps[:, :, :1]).all()  # in all layers or in none

    images = mapping(values)
    assert all(sorted(row) == list(range(64)) for row in images.tolist())  # fixed, and one to one
    assert not (images == np.arange(64)).all(axis=1).any()
    follows = np.stack(
        [(images[layer][experts[:, :, layer]] == experts[:, :, layer + 1]).all(axis=-1) for layer in range(5)]
    )
    # Tokens that keep are no new draws: of 24,000 tokens a tenth may be left.
    assert follows.mean(axis=(1, 2)) == pytest.approx(np.full(5, follow), abs=0.05 if keep == 0.9 else 0.02)
    fresh = ~keeps[..., 0]
    first_or_fresh = np.concatenate([np.ones((REQUESTS, 1), bool), fresh], axis=1)
    pairs = follows[:, first_or_fresh]  # [layers - 1, anchors], independent of one another
    joint = (pairs[1:] & pairs[:-1]).mean()
    assert joint == pytest.approx(follow**2, abs=0.02)


@pytest.mark.parametrize("zipf", [0.0, 1.0])
def test_loads_are_those_without_correlation(zipf):
    values = {"keep_token": 0.5, "follow_layer": 0.5, "zipf_exponent": zipf}
    routing = build_routing({"name": "correlated", **values}, MODEL, seed=8)
    many = all_tokens(2000, 20)
    load = load_statistics(routing, MODEL.moe_layers, many, num_experts=64)
    ranked = inclusion(np.arange(1.0, 65.0) ** -zipf, 6)
    expected = np.empty((6, 64))
    np.put_along_axis(expected, popularity(parse(Config, values), MODEL).expert_at, ranked[None], axis=1)
    # A kept token is no new draw: with half of them kept a count's variance is (1 + 1/2) / (1 - 1/2) = 3 times that.
    spread = np.sqrt(3 * len(many[0]) * expected * (1 - expected))
    assert np.abs((load.counts - len(many[0]) * expected) / spread).max() < 4.5


def test_given_shares_hold_in_every_layer_though_layers_follow(tmp_path):
    shares = np.random.default_rng(0).dirichlet(np.full(64, 3.0), size=6)
    write_shares(tmp_path / "s.json", shares, "a test")
    values = {"name": "correlated", "keep_token": 0.0, "follow_layer": 0.8, "distributions": str(tmp_path / "s.json")}
    load = load_statistics(build_routing(values, MODEL, 1), MODEL.moe_layers, TOKENS, num_experts=64)
    spread = np.sqrt(6 * shares / len(TOKENS[0]))
    assert np.abs((load.shares * 6 - shares * 6) / spread).max() < 4.5


@pytest.mark.parametrize("lookback", [2, 5, 16])
def test_runs_of_kept_experts_are_never_longer_than_the_lookback(lookback):
    keeps = kept(routed(keep_token=1.0 - 1.0 / lookback, follow_layer=0.3, lookback=lookback))[..., 0]
    assert keeps.mean() == pytest.approx(1.0 - 1.0 / lookback, abs=0.01)
    longest = current = np.zeros(REQUESTS, dtype=int)
    for column in keeps.T:
        current = np.where(column, current + 1, 0)
        longest = np.maximum(longest, current)
    assert (longest == lookback - 1).all()  # every token that may keep does
    starts = {int(np.flatnonzero(~row)[0]) for row in keeps}
    assert len(starts) > 1  # requests do not renew in step


def test_the_default_is_within_reach_of_its_lookback():
    keeps = kept(routed())[..., 0]
    assert keeps.mean() == pytest.approx(0.2, abs=0.01)
