"""Cost models of the simulated machine: rooflines from constants."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from harness.machine.base import Lane, LaneKind, Op, Work


@dataclass(frozen=True, kw_only=True)
class LaneCost:
    """seconds = overhead + max(FLOPs / flops_s, device bytes / device_bytes_s, host bytes / ..., link bytes / ...)."""

    overhead_s: float = 0.0
    flops_s: float = float("inf")
    device_bytes_s: float = float("inf")
    host_bytes_s: float = float("inf")
    link_bytes_s: float = float("inf")

    def seconds(self, work: Work) -> float:
        return self.overhead_s + max(
            work.flops / self.flops_s,
            work.device_bytes / self.device_bytes_s,
            work.host_bytes / self.host_bytes_s,
            work.link_bytes / self.link_bytes_s,
        )


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """One `LaneCost` a kind of lane."""

    lanes: Mapping[LaneKind, LaneCost]

    def seconds(self, lane: Lane, op: Op, work: Work) -> float:
        return self.lanes[lane.kind].seconds(work)
