"""PreScope serves small batches: experts run where they are cheapest, by predictions and a cost model of two layers.

Routed experts lie in host memory, the hottest of them on the device too. After each router PreSched decides for each
expert that is not there whether it is loaded on demand or computed by the CPU, and which experts of the next layer are
prefetched into the gap that the CPU leaves on the link.

AsyncIO on this engine: an expert is one transfer of several packets, from pinned memory. Those on demand are urgent and
overtake prefetches at packet boundaries; two slots take them in turns, and prefetches have slots of their own. Without
it (`copies: native`) the model lies in pageable memory, and each tensor is staged and copied by an op of its own.
"""

from __future__ import annotations

from typing import Literal

from harness.config import config, require
from harness.engine.engine import Engine
from harness.engine.strategy import Strategy
from harness.memory.tiers import PAGEABLE, PINNED
from harness.model.spec import ModelSpec
from strategies.common.predictors import LearnedPredictor, Predictor, PredictorConfig, build_predictor
from strategies.expert_offload.deployment import Deployment, PlacementConfig
from strategies.prescope.placer import FixedPrefetching, HitRates, PreSched

__all__ = ["Config", "build"]

_ON_DEMAND = 2  # slots, which alternate (§4.4)
_DECIDED_HERE = (
    "formulas (2) and (4)-(7) are missing from the text that was read: reconstructed (strategies/prescope/presched.py)",
    "P_hit by rank: from the predictor's own held-out text, else from a profile run",
    "prefetches for a layer: as many as a token has experts, where prefetch_slots does not say",
    "the layer after the next (Q4) is looked at where the predictor tells of it: learned ones tell of the next alone",
    "an expert is one transfer of several packets, where the paper has three tensors on three streams",
    "schedule=fixed: an expert comes on demand where that takes less than the CPU needs for it alone",
)


@config
class Config(PlacementConfig, PredictorConfig):
    """The settings of PreScope; `table`, `schedule`, `predictor` and `copies` are the ablations of Fig. 15."""

    schedule: Literal["presched", "fixed"] = "presched"
    copies: Literal["async", "native"] = "async"
    prefetch_slots: int | None = None
    prefetch_groups: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        slots = self.prefetch_slots
        require(slots is None or slots >= 1, "prefetch_slots", f"must be >= 1 or null, got {slots}")
        require(self.prefetch_groups in (2, 3), "prefetch_groups", f"must be 2 or 3, got {self.prefetch_groups}")

    @property
    def weights_tier(self) -> str:
        return PAGEABLE if self.copies == "native" else PINNED

    def group(self, spec: ModelSpec) -> int:
        """Return the experts that can be prefetched for a layer."""
        return self.prefetch_slots or spec.experts_per_token

    def num_slots(self, spec: ModelSpec) -> tuple[int, int]:
        """Return the slots for experts on demand, and those for prefetches: none where nothing predicts, unless their
        number is stated."""
        predicts = self.predictor != "none" or self.prefetch_slots is not None
        return _ON_DEMAND, self.prefetch_groups * self.group(spec) if predicts else 0


def build(config: Config, engine: Engine) -> Strategy:
    """Divide the memory, measure costs, learn which experts are hot, and build the schedule."""
    predictor = build_predictor(config, engine)
    deployment = Deployment.of(config, engine, predictor=predictor)
    costs, group = deployment.measured(), config.group(engine.spec)
    validation = _validation(predictor, deployment)
    deployment.fill_table()
    ahead = 0 if predictor is None else 2 if config.schedule == "presched" else 1
    if config.schedule == "fixed":
        fixed = FixedPrefetching(costs=costs, group=group, looks_ahead=ahead)
        return deployment.strategy(fixed, decided_here=_DECIDED_HERE)
    return deployment.strategy(
        PreSched(costs=costs, group=group, looks_ahead=ahead, hit_rates=validation),
        {"prefetch_group": group, "hit_rates_validated": validation.source},
        decided_here=_DECIDED_HERE,
    )


def _validation(predictor: Predictor | None, deployment: Deployment) -> HitRates:
    """Return P_hit by rank: of a learned predictor's own validation if its folder has it, else of a profile run."""
    if predictor is None:
        return HitRates.of([])
    folder = predictor.judged_by if isinstance(predictor, LearnedPredictor) else None
    if folder is None or not folder.batch_hits:
        return HitRates.of(deployment.profile().views)
    sizes = sorted({size for by_size in folder.batch_hits.values() for size in by_size})
    told = f"the predictor's own: batches of {', '.join(map(str, sizes))} tokens of held-out {folder.validated_on}"
    return HitRates({}, told, folder.batch_hits)
