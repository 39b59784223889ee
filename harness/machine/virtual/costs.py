"""The cost models of the simulated machine: measured tables or cited constants, never a strategy's own model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from harness.machine.base import EstimatedShares, Lane, LaneKind, Op, Work


class Costs(Protocol):
    def seconds(self, lane: Lane, op: Op, work: Work) -> float:
        """Return the seconds of the whole op alone on its lane, overheads included. It is asked once an op, when the op
        begins."""


class MeasuredCosts(Costs, Protocol):
    """Costs that were measured, as far as they were."""

    @property
    def estimated_shares(self) -> EstimatedShares: ...


@dataclass(frozen=True, kw_only=True)
class LaneCost:
    """A lane's cost is seconds = overhead + max(FLOPs / flops_s, device bytes / device_bytes_s, host bytes / ..., link
    bytes / ...)."""

    overhead_s: float = 0.0
    flops_s: float = float("inf")
    device_bytes_s: float = float("inf")
    host_bytes_s: float = float("inf")
    link_bytes_s: float = float("inf")

    def seconds(self, work: Work) -> float:
        rates = (self.flops_s, self.device_bytes_s, self.host_bytes_s, self.link_bytes_s)
        return self.overhead_s + max(amount / rate for amount, rate in zip(work, rates, strict=True))


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """One `LaneCost` a kind of lane. The simulated machine knows how to reckon with it and asks nobody."""

    lanes: Mapping[LaneKind, LaneCost]


ATTENTION_ON_HOST = "decode attention"  # the kind of op that attends on the cpu lane


@dataclass(frozen=True, kw_only=True)
class LatentRoofline:
    """A roofline for a model that caches latents. Attention over these on the CPU is arithmetic, at a rate that is not
    that of matrix products."""

    lanes: Mapping[LaneKind, LaneCost]
    attention: LaneCost  # of the CPU over latents

    def seconds(self, lane: Lane, op: Op, work: Work) -> float:
        attends = lane.kind is LaneKind.CPU and op.kind == ATTENTION_ON_HOST
        return (self.attention if attends else self.lanes[lane.kind]).seconds(work)
