"""The cost models of the simulated machine: measured tables or cited constants, never a strategy's own model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from harness.machine.base import EstimatedShares, Lane, LaneKind, Op, Work


class Costs(Protocol):
    def seconds(self, lane: Lane, op: Op, work: Work) -> float | tuple[float, float]:
        """Return the seconds of the whole op alone on its lane, overheads included. It is asked once an op, when the op
        begins. Of an op in pieces it is asked for each of them, with that piece's work. Two numbers are an op's own
        seconds and those of its launching, on a lane that launches ahead; elsewhere those by which it begins later."""


class MeasuredCosts(Costs, Protocol):
    """Costs that were measured, as far as they were."""

    @property
    def estimated_shares(self) -> EstimatedShares: ...


@dataclass(frozen=True, kw_only=True)
class LaneCost:
    """A lane's cost is seconds = overhead + max(FLOPs / flops_s, device bytes / device_bytes_s, host bytes / ..., link
    bytes / ...), for each of an op's launches."""

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
    """One `LaneCost` a kind of lane, and others for some kinds of op there. The simulated machine knows how to reckon
    with them and asks nobody."""

    lanes: Mapping[LaneKind, LaneCost]
    ops: Mapping[tuple[LaneKind, str], LaneCost] = field(default_factory=dict)  # by lane and kind of op


ATTENTION_ON_HOST = "decode attention"  # the kind of op that attends on the cpu lane
