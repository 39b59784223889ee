"""Cost models of the simulated machine: rooflines from a hardware profile's constants, tables from measurements."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

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


@dataclass(frozen=True)
class Curve:
    """Measured (size, seconds) points, size ascending; linear between them, and beyond them along the outer pieces."""

    sizes: Sequence[float]
    seconds: Sequence[float]

    def __post_init__(self) -> None:
        assert len(self.sizes) == len(self.seconds) >= 1, "a curve needs points"
        assert all(a < b for a, b in zip(self.sizes, self.sizes[1:], strict=False)), "sizes must ascend"

    def at(self, size: float) -> float:
        if len(self.sizes) == 1:
            return self.seconds[0]
        right = min(max(bisect_left(self.sizes, size), 1), len(self.sizes) - 1)
        x0, x1 = self.sizes[right - 1], self.sizes[right]
        y0, y1 = self.seconds[right - 1], self.seconds[right]
        return max(y0 + (y1 - y0) * (size - x0) / (x1 - x0), 0.0)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Curves by op kind over `op.size()`, for one model's shapes; kinds without a curve fall back to a roofline."""

    curves: Mapping[str, Curve]
    fallback: Roofline
    overheads_s: Mapping[LaneKind, float] = field(default_factory=dict)

    def seconds(self, lane: Lane, op: Op, work: Work) -> float:
        curve = self.curves.get(op.kind)
        if curve is None:
            return self.fallback.seconds(lane, op, work)
        return curve.at(op.size()) + self.overheads_s.get(lane.kind, 0.0)
