"""Placements of single experts by lot, on the pipeline of `strategies/expert_offload`: every way to run an expert is
taken, and most guesses are wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from harness.engine.engine import Engine
from harness.engine.strategy import Strategy
from harness.memory.replacement import LeastRecentlyUsed
from strategies.common.predictors import PredictorConfig, build_predictor
from strategies.expert_offload.deployment import Deployment, PlacementConfig
from strategies.expert_offload.placement import LayerView, Placement, Placer
from strategies.klotski.scheduler import InBatches

SIZES = {"batch_size": 4, "max_pass_tokens": 512, "packet_mb": 0.004, "profile_tokens": 24, "table": "none"}


class Slots(PlacementConfig):
    """A config with slots for prefetches."""

    def num_slots(self, spec) -> tuple[int, int]:
        return 2, 4


class Cache(PlacementConfig):
    """A config whose prefetches share the slots of experts on demand, which are a cache."""

    def num_slots(self, spec) -> tuple[int, int]:
        return 5, 0


@dataclass
class ByLot:
    """Places by lot, `cpu_share` of the experts on the CPU, and prefetches experts by lot."""

    moe_layers: Sequence[int]
    cpu_share: float
    looks_ahead: int = 1
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def place(self, view: LayerView) -> Placement:
        on_cpu = [e for e in view.active if self.rng.random() < self.cpu_share]
        on_gpu = [e for e in view.active if e not in on_cpu]
        self.rng.shuffle(on_gpu)
        later = [layer for layer in self.moe_layers if view.layer < layer < view.layer + 3]
        guesses = [(layer, int(self.rng.integers(view.num_experts))) for layer in later for _ in range(3)]
        return Placement(on_gpu=on_gpu, on_cpu=on_cpu, prefetch=guesses)


def placed(
    engine: Engine, placer: Placer | None = None, *, predictor: str = "gate", path: str | None = None,
    online_steps: int = 0, slots: type[PlacementConfig] = Slots, micro_batches: int = 1, cpu_share: float = 0.4,
    **sizes: float,
) -> Strategy:  # fmt: skip
    """Build the strategy of a placer, by lot where none is given."""
    predicted = PredictorConfig(predictor=predictor, predictor_path=path, online_steps=online_steps)
    asked = build_predictor(predicted, engine)
    deployment = Deployment.of(
        replace(slots(**SIZES), **sizes), engine, predictor=asked, num_micro_batches=(micro_batches,),
        replacement=LeastRecentlyUsed(),
    )  # fmt: skip
    strategy = deployment.strategy(placer or ByLot(engine.spec.moe_layers, cpu_share))
    if micro_batches > 1:
        strategy.scheduler = InBatches(strategy.scheduler, micro_batches)
    return strategy
