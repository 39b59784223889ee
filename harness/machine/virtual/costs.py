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


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """One `LaneCost` a kind of lane. The simulated machine knows how to reckon with it and asks nobody."""

    lanes: Mapping[LaneKind, LaneCost]
