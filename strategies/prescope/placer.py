"""Answer after each router by PreSched, or by the rule that stands for it in the paper's ablation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from strategies.expert_offload.costs import ExpertCosts
from strategies.expert_offload.placement import Forecast, LayerView, Placement
from strategies.prescope.presched import Pending, Schedule, schedule

_DRAWS = 16  # batches drawn from the profile's tokens, for each layer
_MOST_AHEAD = 2
Validated = tuple[Forecast, np.ndarray]  # of a layer's tokens: what was predicted, and int64 [tokens, k] as routed


@dataclass(eq=False)
class HitRates:
    """Tells how likely an expert gets tokens that is predicted to have the most but so many (P_hit by rank).

    The predictor's own validation says so: predictions and answers for the profile run's tokens, of which batches of
    any size are drawn. Where there are none, what the predictor itself says of the expert holds.
    """

    validation: Mapping[int, Sequence[Validated]]  # by layers ahead
    _known: dict[tuple[int, int], np.ndarray] = field(default_factory=dict)

    @classmethod
    def of(cls, views: Sequence[LayerView]) -> HitRates:
        """Take the predictions of a profile run, whose passes come layer after layer."""
        found: dict[int, list[Validated]] = {}
        for at, view in enumerate(views):
            for later in views[at + 1 : at + 1 + _MOST_AHEAD]:
                if later.layer in view.ahead:
                    found.setdefault(later.layer - view.layer, []).append((view.ahead[later.layer], later.ids))
        return cls(found)

    def at(self, forecast: Forecast, num_tokens: int, distance: int) -> Sequence[float]:
        """Return the probabilities by rank for a batch of so many tokens, about which `forecast` speaks."""
        if distance not in self.validation:
            order = np.argsort(-forecast.expected, kind="stable")
            return [float(chance) for chance in forecast.likely[order]]
        size = 1 << max(0, num_tokens - 1).bit_length()  # sizes up to the next power of two are alike
        if (size, distance) not in self._known:
            self._known[size, distance] = _drawn(self.validation[distance], size)
        return [float(rate) for rate in self._known[size, distance]]


def _drawn(validation: Sequence[Validated], size: int) -> np.ndarray:
    """Return how often the expert of each rank is active in batches that are drawn from the tokens."""
    rng, hits = np.random.default_rng(0), []
    for forecast, chosen in validation:
        for _ in range(_DRAWS):
            rows = rng.choice(len(chosen), size=size)
            drawn = Forecast(forecast.ids[rows], forecast.chances[rows], forecast.num_experts)
            is_active = np.bincount(chosen[rows].ravel(), minlength=forecast.num_experts) > 0
            hits.append(is_active[np.argsort(-drawn.expected, kind="stable")])
    return np.mean(hits, axis=0)


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

        def scheduled(layer: int, following: Sequence[Pending], between_s: float) -> Schedule:
            rates: Sequence[float] = []
            if following:
                rates = self.hit_rates.at(view.ahead[layer], view.num_tokens, layer - view.layer)
            return schedule(
                self.costs, current, following, busy_s=busy_s, attention_s=between_s, gpu_busy_s=gpu_busy_s,
                hit_rate=rates.__getitem__, most_prefetches=self.group,
            )  # fmt: skip

        following = _pending(view, target)
        found = scheduled(target, following, attention_s)
        prefetch = found.prefetch
        if not found.queued and target + 1 in view.ahead:  # Q4: nothing is to be had from the next layer
            target += 1
            between_s = 2 * attention_s + sum(each.cpu_s(self.costs) for each in following)
            prefetch = scheduled(target, _pending(view, target), between_s).prefetch
        return _placement(view, found.on_demand, [(target, expert) for expert in prefetch])

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
        hottest = sorted(_pending(view, target), key=lambda each: -each.tokens)[: self.group]
        return _placement(view, on_demand, [(target, each.expert) for each in hottest])


def _pending(view: LayerView, layer: int) -> list[Pending]:
    """Return the experts of a later layer that are predicted to get tokens, and are neither there nor on their way."""
    if (forecast := view.ahead.get(layer)) is None:
        return []
    wanted = [int(e) for e in np.flatnonzero(forecast.expected > 0) if not view.holds((layer, int(e)))]
    return [Pending(expert=e, tokens=float(forecast.expected[e]), chance=float(forecast.likely[e])) for e in wanted]


def _placement(view: LayerView, on_demand: Sequence[int], prefetch: Sequence[tuple[int, int]]) -> Placement:
    brought = set(on_demand)
    on_cpu = [e for e in view.absent if e not in brought]
    return Placement(on_gpu=[*view.ready_first, *on_demand], on_cpu=on_cpu, prefetch=prefetch)
