"""Fiddler runs an expert where it is done first: brought to the GPU, or on the CPU where it lies (ICLR 2025).

What is not an expert stays on the device, and so do the experts that are popular offline (its Section 3.2). At run
time (Section 3.3) each active expert that is not there is either brought, which takes the same time for any number of
tokens, or computed on the CPU, in time that grows with its tokens. Nothing is prefetched.

Its public code (`src/fiddler/mixtral.py`) is not followed where it differs. It finds the same choice by trying all
subsets of a layer's experts, with times that are typed in; here each expert is compared alone, as in the paper, by
times that are measured. It computes experts one after another; here CPU and GPU work at a time, as for the systems
beside it.
"""

from __future__ import annotations

from dataclasses import dataclass

from harness.config import config
from harness.engine.engine import Engine
from harness.engine.strategy import Strategy
from strategies.expert_offload.costs import ExpertCosts
from strategies.expert_offload.deployment import Deployment, PlacementConfig
from strategies.expert_offload.placement import LayerView, Placement

__all__ = ["Config", "Fiddler", "build"]

_DECIDED_HERE = (
    "CPU and GPU work at a time: the public code computes one expert after another",
    "the times compared are measured on the machine: the public code has them typed in",
)


@config
class Config(PlacementConfig):
    """Fiddler has no settings of its own."""


@dataclass(frozen=True)
class Fiddler:
    """Compares, for each expert alone, its time on either side."""

    costs: ExpertCosts
    looks_ahead: int = 0

    def place(self, view: LayerView) -> Placement:
        brought_s = self.costs.io_s + self.costs.gpu_s(1)
        is_cheaper = {expert: self.costs.cpu_s(int(view.tokens[expert])) < brought_s for expert in view.absent}
        brought = [expert for expert in reversed(view.absent) if not is_cheaper[expert]]
        on_cpu = [expert for expert in view.absent if is_cheaper[expert]]
        return Placement(on_gpu=[*view.ready_first, *brought], on_cpu=on_cpu)


def build(config: Config, engine: Engine) -> Strategy:
    deployment = Deployment.of(config, engine)
    costs = deployment.measured()
    deployment.fill_table()
    return deployment.strategy(Fiddler(costs), decided_here=_DECIDED_HERE)
