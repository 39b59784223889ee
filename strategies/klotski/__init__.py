"""Klotski takes several batches through a layer together, so that an expert comes once for all (ASPLOS 2025).

* Expert-aware pipeline (its Section 4): behind the gates of all batches, each expert runs over the tokens of all of
  them, the hot ones first, which are there; the cold ones come meanwhile.
* Planner: as few batches as make computing a layer take as long as loading it, no more than memory holds
  (`planner.py`). PreScope compares it with two batches, each of the stated size; so does the default.
* Prefetch by correlation: the next layer's hot experts, by how often tokens of a profile run chose them behind the
  experts that are chosen here (`correlation.py`).

Of the paper its introduction was read, and of the authors' MindSpore code (mindspore-lab/models, research/SYSU/Klotski)
all of `mixtral.py`. That code is followed in how many experts it prefetches, as many as a token has. In three points it
is not followed:

1. The code gives the tokens of an expert to its two most frequent followers alone; here all count by their share.
2. The code goes on counting followers in the run; here the profile run, which is before it, has the last word.
3. The code loads a batch's cold experts behind that batch's gate; here they come behind the gates of all batches.

It has no planner, the number of batches is an argument. The planner's condition is our reading: Klotski states it
separately for attention, gate and experts. Left out: weights on disk, quantised transfers, sparse attention. The CPU
computes none.
"""

from __future__ import annotations

from dataclasses import dataclass

from harness.config import config, require
from harness.engine.engine import Engine
from harness.engine.strategy import Strategy
from harness.model.spec import ModelSpec
from strategies.expert_offload.deployment import Deployment, PlacementConfig
from strategies.expert_offload.placement import LayerView, Placement
from strategies.klotski.correlation import Correlation
from strategies.klotski.planner import LayerTimes, num_batches
from strategies.klotski.scheduler import InBatches

__all__ = ["Config", "Klotski", "build"]

_DECIDED_HERE = (
    "section not read, planner: as few batches as make computing a layer last as long as loading it "
    "(strategies/klotski/planner.py)",
    "section not read, prefetch: all experts that followed those chosen here, by their share; the authors' code, not "
    "followed, counts the two most frequent of each",
    "followers are those of the profile run; the authors' code, not followed, goes on counting in the run",
    "experts come behind the gates of all batches; the authors' code, not followed, loads those of a batch behind its "
    "own gate",
    "all that is no expert lies on the device, as for the systems beside it",
)


_MOST = 4  # batches that are planned


@config
class Config(PlacementConfig):
    """`batch_size` is that of one batch. Where `num_batches` is not set, the planner chooses, at most `max_batches` (4
    where that is not set either) and at most what memory holds; where it ends, or requests do, batches are smaller."""

    num_batches: int | None = 2
    max_batches: int | None = None
    prefetch_slots: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        told = "must be null where num_batches is set: only the planner has a most"
        require(self.num_batches is None or self.max_batches is None, "max_batches", told)
        for name in ("num_batches", "max_batches", "prefetch_slots"):
            value = getattr(self, name)
            require(value is None or value >= 1, name, f"must be >= 1 or null, got {value}")

    def num_slots(self, spec: ModelSpec) -> tuple[int, int]:
        """Return the slots for experts on demand, and those for prefetches."""
        return 2, self.prefetch_slots or spec.experts_per_token


@dataclass(frozen=True)
class Klotski:
    """Runs hot experts first, and prefetches those that are expected to be hot in the next layer."""

    correlation: Correlation
    num_prefetched: int
    looks_ahead: int = 0

    def place(self, view: LayerView) -> Placement:
        there = sorted(view.there, key=lambda expert: (not view.there[expert], -view.tokens[expert], expert))
        hot = self.correlation.hottest(view, self.num_prefetched)
        return Placement(on_gpu=[*there, *reversed(view.absent)], prefetch=[(view.layer + 1, expert) for expert in hot])


def build(config: Config, engine: Engine) -> Strategy:
    numbers = [config.num_batches] if config.num_batches else range(config.max_batches or _MOST, 0, -1)
    deployment = Deployment.of(config, engine, num_micro_batches=numbers, host_experts=False)
    held = -(-deployment.batch_size // config.batch_size)  # batches of the sequences that memory holds together
    costs, spec = deployment.measured(), engine.spec
    correlation = Correlation(deployment.profile().views)
    deployment.fill_table()
    times = LayerTimes(
        num_experts=spec.num_experts,
        experts_per_token=spec.experts_per_token,
        batch_size=config.batch_size,
        resident_share=deployment.table / (spec.num_experts * len(spec.moe_layers)),
        io_s=costs.io_s,
        attention_s=costs.attention_s,
        gpu_s=costs.gpu_s,
    )
    chosen = min(config.num_batches or num_batches(times, held), deployment.batch_size)
    deployment.batch_size = min(deployment.batch_size, chosen * config.batch_size)
    strategy = deployment.strategy(
        Klotski(correlation, config.num_slots(spec)[1]), {"num_batches": chosen}, decided_here=_DECIDED_HERE
    )
    strategy.scheduler = InBatches(strategy.scheduler, chosen)
    return strategy
