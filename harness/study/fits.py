"""Fit the settings of synthetic routing to recorded routing, and measure how near the one comes to the other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize_scalar

from harness.routing.base import Routing
from harness.routing.build import build_routing
from harness.routing.inclusion import inclusion
from harness.study.correlation import chosen_rates, followed_shares, kept_share
from harness.study.loads import loads_of
from harness.study.recorded import Text

Floats = NDArray[np.float64]
MOST_EXPONENT = 5.0
LOOKBACK = 64  # of routing=correlated, where keep_token may be at most 1 - 1/lookback


@dataclass(frozen=True)
class Shape:
    """Synthetic routing needs these numbers of a model."""

    num_layers: int
    num_experts: int
    experts_per_token: int

    @property
    def moe_layers(self) -> tuple[int, ...]:
        return tuple(range(self.num_layers))


def sorted_loads(text: Text) -> Floats:
    """Return the share of the load [experts] at each rank of popularity, the most popular first: means over layers,
    each of which ranks its experts."""
    return np.asarray(np.sort(loads_of(text).shares, axis=1)[:, ::-1].mean(axis=0))


def zipf_loads(exponent: float, num_experts: int, k: int) -> Floats:
    """Return the share of the load [experts] that `routing=skewed` gives each rank."""
    rates = np.arange(1, num_experts + 1, dtype=np.float64) ** -exponent
    return np.asarray(inclusion(rates / rates.sum(), k) / k)


def fit_exponent(text: Text) -> float:
    """Return the `zipf_exponent` whose loads by rank are nearest to the recorded ones (least squares)."""
    wanted = sorted_loads(text)

    def distance(exponent: float) -> float:
        return float(((zipf_loads(exponent, text.num_experts, text.k) - wanted) ** 2).sum())

    found = minimize_scalar(distance, bounds=(0.0, MOST_EXPONENT), method="bounded", options={"xatol": 1e-3})
    return float(found.x)


def fit(train: Text, test: Text) -> dict[str, float]:
    """Return settings of `routing=correlated`, of which `routing=skewed` has the first.

    `keep_token` and `follow_layer` are solved for: measured share = setting + (1 - setting) * share by chance. What
    chance gives is that of the fitted Zipf loads, where a layer's image has the same rank as its source.
    """
    exponent = round(fit_exponent(train), 2)
    rates = zipf_loads(exponent, train.num_experts, train.k) * train.k
    by_chance = float((rates**2).sum() / train.k)
    kept = kept_share(train, 1)
    followed = followed_shares(train, test)["followed"]
    assert kept is not None, "no request of two tokens"
    keep = min(_beyond(float(kept.mean()), by_chance), 1 - 1 / LOOKBACK)
    follow = _beyond(float(np.mean(followed)), by_chance) if followed else 0.0
    return {"zipf_exponent": exponent, "keep_token": round(keep, 3), "follow_layer": round(follow, 3)}


def _beyond(measured: float, by_chance: float) -> float:
    return max(0.0, (measured - by_chance) / (1 - by_chance))


def synthetic(like: Text, values: Mapping[str, Any], seed: int) -> Text:
    """Draw routing by the `routing` group `values` for requests of the same number and lengths."""
    shape = Shape(like.num_layers, like.num_experts, like.k)
    routing = build_routing(values, shape, seed)
    return drawn(routing, like)


def drawn(routing: Routing, like: Text) -> Text:
    """Ask a routing for requests of the same number and lengths."""
    requests = np.repeat(np.arange(len(like.starts) - 1), np.diff(like.starts))
    layers = [routing.experts(requests, like.offsets, layer) for layer in range(like.num_layers)]
    return Text(like.num_experts, like.starts, np.stack(layers, axis=1).astype(np.int16), like.numbers)


def likeness(train: Text, test: Text) -> dict[str, Any]:
    """Describe a routing by what the fits aim at: means over layers."""
    kept = kept_share(test, 1)
    loads, rates = loads_of(test), chosen_rates(test)
    return {
        "entropy_bits": float(loads.entropy_bits.mean()),
        "busiest_over_mean": float(loads.imbalance.mean()),
        "kept": None if kept is None else float(kept.mean()),
        "kept_by_chance": float(((rates**2).sum(axis=1) / test.k).mean()),
        "followed": float(np.mean(followed_shares(train, test)["followed"])),
    }
