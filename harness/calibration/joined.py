"""Cost ops that do the work of several: what a table of measured costs holds of them, and how it is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from harness.bench.fitting import Interpolated, Plane, fit_plane, typical_by_features
from harness.machine.base import Op

TOGETHER = ", together"  # ends the key of an op that does the work of several
Samples = Sequence[tuple[tuple[float, ...], float]]


def features_of(op: Op) -> tuple[float, ...]:
    """Return what a sample says of an op: its cost features, and how many others it is joined of where it is."""
    return (*op.cost_features(), *([float(op.joined)] if op.joined > 1 else []))


def joint_planes(by_key: Mapping[str, Samples]) -> dict[str, Plane]:
    """Fit the seconds of joined ops, by the key of a single one, over their number and what all have together."""
    found = {}
    for key in [key for key in by_key if key.endswith(TOGETHER)]:
        points = {of_all(at, n): s for (*at, n), s in typical_by_features(by_key[key]).items()}
        if len(points) > len(next(iter(points))):  # as many as a plane has numbers; fewer could lie on any
            found[key.removesuffix(TOGETHER)] = fit_plane(points)
    return found


def joint_seconds(op: Op, one: Interpolated | Plane, joint: Plane | None) -> float:
    """Return the seconds of an op where `one` has those of a single op, and `joint` those of several as far as they
    were measured."""
    features, number = op.cost_features(), op.joined
    one_s = one(features)
    return max(one_s, joint(of_all(features, number)) if number > 1 and joint else number * one_s)


def of_all(features: Sequence[float], number: float) -> tuple[float, ...]:
    """Return the number of joined ops, and what all of them have together of each feature of one."""
    return (number, *(feature * number for feature in features))
