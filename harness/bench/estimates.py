"""Estimate the seconds of kinds of op that were not measured: by their work, at the rates of their lane's measured
kinds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from harness.bench.fitting import Plane, fit_plane, typical_by_features
from harness.machine.base import Work


@dataclass(frozen=True, kw_only=True)
class LaneRates:
    """Estimates the seconds of an op from its work, by a plane through the lane's measured ops. A component of `Work`
    (FLOPs, bytes by tier) may get no time from the plane, because other components came with it in all of the measured
    ops; it counts at the best rate that any of them reached."""

    plane: Plane  # over units of `scale`
    scale: Work
    least_s: tuple[float | None, ...]  # by component: seconds a unit at the best rate; None where no op had any

    @classmethod
    def of(cls, measured: Sequence[tuple[Work, float]]) -> LaneRates:
        """Fit to (work, seconds) of one or more ops."""
        scale = Work(*(max(amounts) or 1.0 for amounts in zip(*(work for work, _ in measured), strict=True)))
        plane = fit_plane(typical_by_features([(_over(work, scale), seconds) for work, seconds in measured]))
        reached = [[seconds / work[i] for work, seconds in measured if work[i] > 0] for i in range(len(scale))]
        return cls(plane=plane, scale=scale, least_s=tuple(min(found, default=None) for found in reached))

    def seconds(self, work: Work) -> float | None:
        """Return the estimate; None where no measured op of the lane had any work of this op's kinds."""
        had = [i for i, amount in enumerate(work) if amount > 0 and self.least_s[i] is not None]
        at_best = [work[i] * (self.least_s[i] or 0.0) for i in had if not self.plane.weights[i]]
        return max(self.plane(_over(work, self.scale)), *at_best, 0.0) if had else None


def _over(work: Work, scale: Work) -> tuple[float, ...]:
    return tuple(np.divide(work, scale).tolist())
