"""Load experts when the router has chosen them, and keep them in a cache with a policy.

All device memory that is left is the cache, of all layers together. It begins with the hottest experts. A step is one
layer of one pass: of its experts those that are there run first, and each missing one takes the place of the policy's
victim. Nothing is prefetched, and the CPU computes no expert.

* `lru`, `lfu`: evict what was used longest ago, or least often.
* `arc`: shares the cache between both kinds of use (Megiddo and Modha, FAST 2003).
* `belady`: evicts what is used again last (Belady, 1966). It is an oracle, not a system: it reads the routing of an
  earlier run of the same requests, which `recorded` names. As each missing expert is brought into the cache, its hits
  are at most those of the optimum that may let an expert pass by (`harness/study/caches.py`).
"""

from __future__ import annotations

from typing import Literal

from harness.config import config, require
from harness.engine.engine import Engine
from harness.engine.strategy import Strategy
from harness.memory.expert_slots import Replacement
from harness.memory.replacement import AdaptiveReplacement, FarthestNextUse, LeastFrequentlyUsed, LeastRecentlyUsed
from harness.model.spec import ModelSpec
from strategies.expert_cache.foresight import AsRecorded, recorded_steps
from strategies.expert_offload.deployment import Deployment, PlacementConfig
from strategies.expert_offload.placement import LayerView, Placement

__all__ = ["Config", "build"]


@config
class Config(PlacementConfig):
    """The cache takes what is left of the device, where `cache_slots` is not set. `recorded` is for `belady` alone."""

    policy: Literal["lru", "lfu", "arc", "belady"] = "lru"
    cache_slots: int | None = None
    recorded: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        slots = self.cache_slots
        require(slots is None or slots >= 1, "cache_slots", f"must be >= 1 or null, got {slots}")
        needs = "belady knows the future from routing that an earlier run of the same requests recorded"
        wanted = f"must be a trace (routing.jsonl.gz of a run with record_routing=true): {needs}"
        require(self.policy != "belady" or self.recorded is not None, "recorded", wanted)
        told = f"must be null with policy={self.policy}, which does not know the future"
        require(self.policy == "belady" or self.recorded is None, "recorded", told)

    def num_slots(self, spec: ModelSpec) -> tuple[int, int]:
        """Return the slots for experts on demand at the least, and none for prefetches."""
        return self.cache_slots or 2, 0


class Cached:
    """Runs every expert on the GPU, those that are there first, either in the order of their numbers."""

    looks_ahead = 0

    def place(self, view: LayerView) -> Placement:
        return Placement(on_gpu=[*sorted(view.there), *sorted(view.absent)])


def build(config: Config, engine: Engine) -> Strategy:
    deployment = Deployment.of(config, engine, host_experts=False)
    num_slots = config.cache_slots or deployment.most_cached()
    warm = deployment.ranked()[:num_slots]
    if config.policy != "belady":
        deployment.fill_cache(num_slots, _policy(config.policy, num_slots), warm)
        return deployment.strategy(Cached(), {"policy": config.policy})
    steps = recorded_steps(str(config.recorded), deployment)
    foresight = FarthestNextUse([*((key,) for key in warm), *steps])
    deployment.fill_cache(num_slots, foresight, warm)
    return deployment.strategy(AsRecorded(Cached(), steps), {"policy": "belady (oracle)", "recorded": config.recorded})


def _policy(name: str, num_slots: int) -> Replacement:
    match name:
        case "lru":
            return LeastRecentlyUsed()
        case "lfu":
            return LeastFrequentlyUsed()
    return AdaptiveReplacement(num_slots)
