"""Answer after each router by PreSched, or by the rule that stands for it in the paper's ablation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import log2

import numpy as np
from numpy.typing import NDArray

from harness.llapor.files import BatchHits
from strategies.expert_offload.costs import ExpertCosts
from strategies.expert_offload.placement import Forecast, LayerView, Placement
from strategies.prescope.presched import Pending, Schedule, schedule

_DRAWS = 16  # batches drawn from the profile's tokens, for each layer
_TOKENS_AT_ONCE = 1 << 16  # of several draws together
_MOST_AHEAD = 2
Validated = tuple[Forecast, np.ndarray]  # of a layer's tokens: what was predicted, and int64 [tokens, k] as routed


@dataclass(eq=False)
class HitRates:
    """Tells how likely an expert gets tokens that is predicted to have the most but so many (P_hit by rank).

    A learned predictor's `own` validation says so, layer by layer, for the nearest of some sizes of batches. Else the
    predictions and answers of the profile run do, of whose tokens batches of any size are drawn. Where there is
    neither, what the predictor itself says of the expert holds.
    """

    validation: Mapping[int, Sequence[Validated]]  # by layers ahead
    source: str | None = None  # what the validation is of; None where there is none
    own: BatchHits = field(default_factory=dict)  # one layer ahead
    _known: dict[tuple[int, int], np.ndarray] = field(default_factory=dict)

    @classmethod
    def of(cls, views: Sequence[LayerView]) -> HitRates:
        """Take the predictions of a profile run, whose passes come layer after layer."""
        found: dict[int, list[Validated]] = {}
        for at, view in enumerate(views):
            for later in views[at + 1 : at + 1 + _MOST_AHEAD]:
                if later.layer in view.ahead:
                    found.setdefault(later.layer - view.layer, []).append((view.ahead[later.layer], later.ids))
        num_tokens = sum(view.num_tokens for view in views) // max(1, len({view.layer for view in views}))
        return cls(found, f"a profile run of {num_tokens} random tokens" if found else None)

    def at(self, forecast: Forecast, num_tokens: int, layer: int, distance: int) -> NDArray[np.float64]:
        """Return the probability [experts] of each expert of `layer`, for a batch of so many tokens about which
        `forecast` was made `distance` layers before.

        An expert's rank is that among all experts of the forecast, wherever they are.
        """
        if distance == 1 and (sizes := self.own.get(layer)):
            nearest = min(sizes, key=lambda size: abs(log2(size / num_tokens)))
            return _of_experts(forecast, sizes[nearest])
        if distance not in self.validation:
            return forecast.likely
        size = 1 << max(0, num_tokens - 1).bit_length()  # sizes up to the next power of two are alike
        if (size, distance) not in self._known:
            self._known[size, distance] = _drawn(self.validation[distance], size)
        return _of_experts(forecast, self._known[size, distance])


def _of_experts(forecast: Forecast, by_rank: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the rate [experts] of each expert from those of ranks."""
    rates = np.empty(forecast.num_experts)
    rates[_ranked(forecast)] = by_rank
    return rates


def _ranked(forecast: Forecast) -> NDArray[np.int64]:
    """Return all experts of a forecast, the one that is expected to get most tokens first."""
    return np.argsort(-forecast.expected, kind="stable")


def _drawn(validation: Sequence[Validated], size: int) -> np.ndarray:
    """Return how often the expert of each rank is active in batches that are drawn from the tokens."""
    rng, hits = np.random.default_rng(0), []
    at_once = min(_DRAWS, max(1, _TOKENS_AT_ONCE // size))
    for forecast, chosen in validation:
        for first in range(0, _DRAWS, at_once):
            rows = rng.integers(len(chosen), size=(min(at_once, _DRAWS - first), size))
            expected = _sums(forecast.ids[rows], forecast.num_experts, forecast.chances[rows])
            is_active = _sums(chosen[rows], forecast.num_experts) > 0
            hits.append(np.take_along_axis(is_active, np.argsort(-expected, axis=1, kind="stable"), axis=1))
    return np.mean(np.concatenate(hits), axis=0)


def _sums(ids: np.ndarray, num_experts: int, weights: np.ndarray | None = None) -> np.ndarray:
    """Sum the weights, or count the choices, of experts by batch: [batches, num_experts].

    `ids` and `weights` are [batches, tokens, k].
    """
    apart = ids + num_experts * np.arange(len(ids))[:, None, None]
    found = np.bincount(apart.ravel(), None if weights is None else weights.ravel(), len(ids) * num_experts)
    return found.reshape(len(ids), num_experts)


@dataclass(frozen=True, eq=False, kw_only=True)
class PreSched:
    """Decides by the cross-layer cost model. `group` bounds the prefetches for a layer. Without predictions this is the
    greedy schedule of each layer by itself (2)."""

    costs: ExpertCosts
    group: int
    looks_ahead: int
    hit_rates: HitRates

    def place(self, view: LayerView) -> Placement:
        current = [Pending(expert=e, tokens=float(view.tokens[e])) for e in view.absent]
        target, attention_s = view.layer + 1, self._attention_s(view)
        busy_s = view.link_busy_s(self.costs.io_s)
        gpu_busy_s = sum(self.costs.gpu_s(view.tokens[e]) for e in view.there)

        def scheduled(following: Sequence[Pending], between_s: float) -> Schedule:
            return schedule(
                self.costs, current, following, busy_s=busy_s, attention_s=between_s, gpu_busy_s=gpu_busy_s,
                most_prefetches=self.group,
            )  # fmt: skip

        following = self._pending(view, target)
        found = scheduled(following, attention_s)
        prefetch = found.prefetch
        if not found.queued and target + 1 in view.ahead:  # Q4: nothing is to be had from the next layer
            target += 1
            between_s = 2 * attention_s + sum(each.cpu_s(self.costs) for each in following)
            prefetch = scheduled(self._pending(view, target), between_s).prefetch
        return _placement(view, found.on_demand, [(target, expert) for expert in prefetch])

    def _pending(self, view: LayerView, layer: int) -> list[Pending]:
        """Return what is wanted of a later layer, with the probability that each expert gets tokens. Those that never
        do, by the predictor's validation, are left out."""
        if not (wanted := _wanted(view, layer)):
            return []
        chances = self.hit_rates.at(view.ahead[layer], view.num_tokens, layer, layer - view.layer)
        return [Pending(expert=e, tokens=n, chance=float(chances[e])) for e, n in wanted.items() if chances[e] > 0]

    def _attention_s(self, view: LayerView) -> float:
        return self.costs.between_routers_s(view.num_tokens, is_prefill=view.is_prefill)


@dataclass(frozen=True, eq=False, kw_only=True)
class FixedPrefetching:
    """Prefetches as many experts before every layer as a group holds, without asking whether that pays.

    An expert comes on demand where that takes less than the CPU needs for this expert alone. So the paper's ablation
    without PreSched is read.
    """

    costs: ExpertCosts
    group: int
    looks_ahead: int

    def place(self, view: LayerView) -> Placement:
        costs = self.costs
        on_demand = [
            e for e in reversed(view.absent)
            if costs.io_s + costs.gpu_s(view.tokens[e]) < costs.cpu_s(view.tokens[e])
        ]  # fmt: skip
        target = view.layer + 1
        wanted = _wanted(view, target)
        hottest = sorted(wanted, key=lambda expert: -wanted[expert])[: self.group]
        return _placement(view, on_demand, [(target, expert) for expert in hottest])


def _wanted(view: LayerView, layer: int) -> dict[int, float]:
    """Return the experts of a later layer that are predicted to get tokens, and are neither there nor on their way,
    with these tokens."""
    if (forecast := view.ahead.get(layer)) is None:
        return {}
    predicted = np.flatnonzero(forecast.expected > 0).tolist()
    return {expert: float(forecast.expected[expert]) for expert in predicted if not view.holds((layer, expert))}


def _placement(view: LayerView, on_demand: Sequence[int], prefetch: Sequence[tuple[int, int]]) -> Placement:
    brought = set(on_demand)
    on_cpu = [e for e in view.absent if e not in brought]
    return Placement(on_gpu=[*view.ready_first, *on_demand], on_cpu=on_cpu, prefetch=prefetch)
