"""Fate predicts the next layer's experts by that layer's gate, and brings them early (2025, arXiv 2502.12224).

* Cross-layer prefetch: the next layer's gate gets this layer's gate input. As many experts are brought as fit in the
  time until the next gate, n = T / t_expert, those with the most expected tokens first, and one at the least.
* Experts that were not foreseen are brought on demand, the most popular first. The CPU computes none.
* Shallow-favouring cache: the first layers, whose prediction is weakest, have a place for each of their experts, the
  others share the rest evenly. Within a layer ARC chooses the victim (`AdaptiveReplacement`).

Of the paper its abstract was read, and secondary descriptions, of which is how many layers are shallow (3 of 24 for
Qwen1.5-MoE; here an eighth of the layers where nothing is set). Of the authors' code (FFFzy/Fate_open on GitHub) were
read `utils/prefetch_k.py`, `utils/memory_cost.py` and `models/Qwen/modeling_qwen_moe.py`. In decode it has the same n,
measured once, and its gate runs on the GPU, as here; descriptions have the CPU. In three points it is not followed:

1. The code's first four layers are shallow, whatever the model.
2. In prefill the code prefetches all experts that are predicted, the most popular first.
3. In decode it prefetches n experts by gate weight, even if a token has fewer; here only those that a token would have.

Left out: quantised transfers, since tokens are exact here.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from harness.config import config, require
from harness.engine.engine import Engine
from harness.engine.strategy import Strategy
from harness.memory.replacement import AdaptiveReplacement, ByLayer
from harness.model.spec import ModelSpec
from strategies.common.predictors import PredictorConfig, build_predictor
from strategies.expert_offload.costs import ExpertCosts
from strategies.expert_offload.deployment import Deployment, PlacementConfig
from strategies.expert_offload.placement import LayerView, Placement
from strategies.fate.sizes import cache_sizes

__all__ = ["Config", "Fate", "build"]

_DECIDED_HERE = (
    "the paper's text was not read: its abstract, secondary descriptions and the authors' code were",
    "left out: quantised transfers, since tokens are exact here",
    "shallow layers, whose experts all have a place in the cache: an eighth of the layers; the authors' code, not "
    "followed, has four",
    "how many are prefetched: as many as the link brings until the next gate, one at the least; the authors' code, not "
    "followed, brings all that are predicted in prefill, and in decode more than a token has where there is time",
    "the next layer's gate is applied on the gpu lane, as in the authors' code; secondary descriptions have the CPU",
)


@config
class Config(PlacementConfig, PredictorConfig):
    """The first `shallow_layers` with experts have places for all of them; where it is not set, an eighth do."""

    shallow_layers: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        shallow = self.shallow_layers
        require(shallow is None or shallow >= 0, "shallow_layers", f"must be >= 0 or null, got {shallow}")

    def num_slots(self, spec: ModelSpec) -> tuple[int, int]:
        """Return the slots for experts on demand at the least, one for each layer, and none for prefetches."""
        return len(spec.moe_layers), 0


@dataclass(frozen=True)
class Fate:
    """Runs all experts on the GPU, and prefetches what the link can bring until the next gate."""

    costs: ExpertCosts
    looks_ahead: int = 1

    def place(self, view: LayerView) -> Placement:
        on_gpu = [*view.ready_first, *reversed(view.absent)]
        forecast = view.ahead.get(view.layer + 1)
        if forecast is None:
            return Placement(on_gpu=on_gpu)
        until_gate_s = self.costs.between_routers_s(view.num_tokens, is_prefill=view.is_prefill)
        until_gate_s += sum(self.costs.gpu_s(int(view.tokens[expert])) for expert in on_gpu)
        order = np.argsort(-forecast.expected, kind="stable")[: max(1, int(until_gate_s / self.costs.io_s))]
        wanted = [(view.layer + 1, int(expert)) for expert in order if forecast.expected[expert] > 0]
        return Placement(on_gpu=on_gpu, prefetch=wanted)


def build(config: Config, engine: Engine) -> Strategy:
    deployment = Deployment.of(config, engine, predictor=build_predictor(config, engine), host_experts=False)
    costs, layers = deployment.measured(), engine.spec.moe_layers
    num_slots = deployment.most_cached()
    shallow = -(-len(layers) // 8) if config.shallow_layers is None else config.shallow_layers
    sizes = cache_sizes(num_slots, layers, engine.spec.num_experts, shallow=shallow)
    left, warm = dict(sizes), []
    for layer, expert in deployment.ranked():
        if left[layer]:
            left[layer] -= 1
            warm.append((layer, expert))
    deployment.fill_cache(num_slots, ByLayer(sizes, AdaptiveReplacement), warm)
    return deployment.strategy(Fate(costs), {"cache_by_layer": list(sizes.values())}, decided_here=_DECIDED_HERE)
