"""Decide placements that need no costs: what other systems begin with, and comparisons. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from strategies.expert_offload.placement import LayerView, Placement


@dataclass(frozen=True)
class OnDemandOnly:
    """Runs every expert on the GPU, those that are there first; nothing is prefetched."""

    looks_ahead: int = 0

    def place(self, view: LayerView) -> Placement:
        return Placement(on_gpu=[*view.ready_first, *reversed(view.absent)])


@dataclass(frozen=True)
class AbsentOnCpu:
    """Runs on the CPU what is not on the device."""

    looks_ahead: int = 0

    def place(self, view: LayerView) -> Placement:
        return Placement(on_gpu=view.ready_first, on_cpu=view.absent)
