"""HybriMoE spreads each layer over CPU, GPU and link by a simulation ahead of it (DAC 2025, arXiv 2504.05897).

* Schedule (Section IV-B): each layer's active experts are divided by a greedy simulation of the three (`schedule.py`).
* Prefetch by impact (Section IV-C): the gates of the next three layers predict their experts; what would make its
  layer's simulated schedule shorter by most is brought first, as long as the link is idle until the next gate.
* Cache by score (Section IV-D): "minus recent score", S = alpha TopP(s) + (1 - alpha) S, evicts the lowest
  (`LowestRecentScore`); alpha is 0.5, as in the public code (`ktransformers/operators/experts.py`).

The paper is followed where its public code differs: the code prefetches by score, keeps all experts of a prompt on the
GPU, and gives each layer as many places of the cache. Only the scores of chosen experts come to the host, so that p is
the experts of a token, where the paper has twice as many. Simulated runs know no gate weights: a score is then the
share of the tokens that chose the expert.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

import numpy as np

from harness.config import config, require
from harness.engine.engine import Engine
from harness.engine.strategy import Strategy
from harness.memory.expert_slots import Key
from harness.memory.replacement import LowestRecentScore
from strategies.common.predictors import PredictorConfig, build_predictor
from strategies.expert_offload.costs import ExpertCosts
from strategies.expert_offload.deployment import Deployment, PlacementConfig
from strategies.expert_offload.placement import Forecast, LayerView, Placement
from strategies.hybrimoe.schedule import Schedule, Times, impacts_s, schedule

__all__ = ["Config", "HybriMoE", "build"]

_LIKELY = 0.5  # probability from which an expert counts as active in a later layer
_CANDIDATES = 4  # of a later layer, the heaviest: lighter ones are the CPU's
_DECIDED_HERE = (
    "an expert counts as active in a later layer where its probability is 0.5 or more",
    "of a later layer the four heaviest experts may be prefetched",
    "scores: weights of a token's chosen experts alone, the others' stay on the device",
    "what was prefetched is evicted last until its layer is over, and not for another prefetch",
    "one cache for all layers, as in the paper's text: the public code gives each layer as many places",
)


@config
class Config(PlacementConfig, PredictorConfig):
    """`score_weight` is the paper's alpha."""

    score_weight: float = 0.5
    prefetch_layers: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        weight, layers = self.score_weight, self.prefetch_layers
        require(0 < weight <= 1, "score_weight", f"must be above 0 and at most 1, got {weight:g}")
        require(layers >= 1, "prefetch_layers", f"must be >= 1, got {layers}; predictor=none prefetches nothing")


@dataclass(frozen=True)
class HybriMoE:
    """Schedules the layer, notes its scores, and prefetches by impact."""

    costs: ExpertCosts
    scores: LowestRecentScore
    looks_ahead: int = 3

    @property
    def times(self) -> Times:
        return Times(self.costs.io_s, self.costs.cpu_s, self.costs.gpu_s)

    def place(self, view: LayerView) -> Placement:
        gate = np.bincount(view.ids.ravel(), weights=view.weights.ravel(), minlength=view.num_experts)
        self.scores.scored(view.layer, gate / view.num_tokens)
        tokens = {expert: int(view.tokens[expert]) for expert in view.active}
        planned = schedule(tokens, view.there, self.times, link_busy_s=view.link_busy_s(self.costs.io_s))
        return Placement(on_gpu=planned.on_gpu, on_cpu=planned.on_cpu, prefetch=self._prefetches(view, planned))

    def _prefetches(self, view: LayerView, planned: Schedule) -> list[Key]:
        """Choose, one after another, what brings most, while the link is idle."""
        until_gate_s = planned.end_s + self.costs.between_routers_s(view.num_tokens, is_prefill=view.is_prefill)
        link_end_s = planned.link_end_s + view.num_queued() * self.costs.io_s
        number = ceil((until_gate_s - link_end_s) / self.costs.io_s)  # that begin until then
        layers = {layer: self._expected(forecast) for layer, forecast in view.ahead.items()} if number > 0 else {}
        there = {layer: {e: True for e in tokens if view.holds((layer, e))} for layer, tokens in layers.items()}
        gains = {layer: self._gains(layer, tokens, there[layer]) for layer, tokens in layers.items()}
        chosen: list[Key] = []
        while len(chosen) < number:
            found = {key: gain for of_layer in gains.values() for key, gain in of_layer.items()}
            best = max(found, key=lambda key: (found[key], -key[0], -key[1]), default=None)
            if best is None or found[best] <= 0:
                break
            layer, expert = best
            chosen.append(best)
            there[layer][expert] = True
            gains[layer] = self._gains(layer, layers[layer], there[layer])
        return chosen

    def _gains(self, layer: int, tokens: Mapping[int, float], there: Mapping[int, bool]) -> dict[Key, float]:
        """Return how much earlier a layer would be done with each expert that may be prefetched next."""
        heaviest = sorted(tokens.keys() - there, key=lambda e: -tokens[e])[:_CANDIDATES]
        gains = impacts_s(tokens, there, self.times, heaviest)
        return {(layer, expert): gain for expert, gain in gains.items()}

    def _expected(self, forecast: Forecast) -> dict[int, float]:
        likely = np.flatnonzero(forecast.likely >= _LIKELY)
        return {int(expert): max(1.0, float(forecast.expected[expert])) for expert in likely}


def build(config: Config, engine: Engine) -> Strategy:
    deployment = Deployment.of(config, engine, predictor=build_predictor(config, engine))
    costs, scores = deployment.measured(), LowestRecentScore(config.score_weight)
    num_slots = deployment.most_cached()
    deployment.fill_cache(num_slots, scores, deployment.ranked()[:num_slots], spares_prefetches=True)
    return deployment.strategy(HybriMoE(costs, scores, looks_ahead=config.prefetch_layers), decided_here=_DECIDED_HERE)
