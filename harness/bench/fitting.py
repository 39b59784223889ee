"""Fit functions to samples: interpolation where one feature decides, a plane where several do. Torch-free."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low

import numpy as np
from scipy.optimize import isotonic_regression, nnls

Sample = tuple[tuple[float, ...], float]  # features, seconds
_FAR_OUT = 10.0  # times the median
_SHORT_S = 3e-3  # a wait for the interpreter or a core; whatever is shorter may be one
_ROUNDS = 4  # of a fit; each weighs errors by the result of the one before


@dataclass(frozen=True, kw_only=True)
class Interpolated:
    """Holds seconds at ascending values of one feature, which never fall, with straight lines between them. Below the
    first value its seconds hold, since fixed costs stay; beyond the last, the slope over the upper half of the range
    goes on."""

    at: tuple[float, ...]
    seconds: tuple[float, ...]

    def __call__(self, features: Sequence[float]) -> float:
        x, last = features[0], self.at[-1]
        if x <= last:
            return float(np.interp(x, self.at, self.seconds))
        middle = (self.at[0] + last) / 2
        rise = self.seconds[-1] - float(np.interp(middle, self.at, self.seconds))
        return self.seconds[-1] + (x - last) * rise / max(last - middle, 1e-12) if last > middle else self.seconds[-1]


@dataclass(frozen=True, kw_only=True)
class Plane:
    """Computes seconds = fixed + sum of weights times features. Neither the fixed part nor a weight is negative."""

    fixed: float
    weights: tuple[float, ...]

    def __call__(self, features: Sequence[float]) -> float:
        if len(self.weights) == len(features) == 1:
            return self.fixed + self.weights[0] * features[0]
        return self.fixed + sum(w * f for w, f in zip(self.weights, features, strict=True))


@dataclass(frozen=True, kw_only=True)
class ByLength:
    """Computes the seconds of attention: those of a plane, times a factor for the rows and for what each attends to.

    The last two features are rows and all that they attend to. Between measured lengths, and at each of them between
    the logarithms of numbers of rows, the factor lies on straight lines; beyond the first and the last it stays.
    """

    plane: Plane
    lengths: tuple[float, ...]  # ascending
    rows: tuple[tuple[float, ...], ...]  # their logarithms, ascending, by length
    factors: tuple[tuple[float, ...], ...]

    def __call__(self, features: Sequence[float]) -> float:
        rows, attended = features[-2:]
        at_lengths = [np.interp(np.log(rows), *known) for known in zip(self.rows, self.factors, strict=True)]
        return self.plane(features) * float(np.interp(attended / rows, self.lengths, at_lengths))


def fit(samples: Sequence[Sample]) -> Interpolated | Plane:
    """Fit a curve of one feature, or a plane of several, through the typical seconds of equal features. The curve is
    the nearest one that never falls, for more work takes no less time. Raises ValueError without samples."""
    if not samples:
        raise ValueError("no samples to fit")
    points = typical_by_features(samples)
    if len(next(iter(points))) == 1:
        ordered = sorted((features[0], seconds) for features, seconds in points.items())
        rising = isotonic_regression([seconds for _, seconds in ordered]).x
        return Interpolated(at=tuple(x for x, _ in ordered), seconds=tuple(rising.tolist()))
    return fit_plane(points)


def fit_plane(points: dict[tuple[float, ...], float]) -> Plane:
    """Fit a plane by least squares of the errors relative to the fitted seconds. (Relative to the measured ones, a fit
    would follow the fast ones among measurements that scatter.) Weights are non-negative: more work never takes less
    time."""
    seconds = np.array(list(points.values()))
    rows = np.array([(1.0, *features) for features in points])
    fitted = np.full(len(seconds), max(float(seconds.mean()), 1e-9))
    for _ in range(_ROUNDS):
        found, _ = nnls(rows / fitted[:, None], seconds / fitted)
        fitted = np.maximum(rows @ found, max(float(seconds.mean()) * 1e-3, 1e-9))
    return Plane(fixed=float(found[0]), weights=tuple(float(w) for w in found[1:]))


def fit_by_length(points: dict[tuple[float, ...], float]) -> ByLength:
    """Fit a plane to all points, and a factor to each: what was measured over what the plane says."""
    plane = fit_plane(points)
    found: dict[float, list[tuple[float, float]]] = defaultdict(list)
    for features, seconds in points.items():
        rows, attended = features[-2:]
        found[round(attended / rows, 3)].append((float(np.log(rows)), seconds / max(plane(features), 1e-12)))
    lengths = tuple(sorted(found))
    rows_of, factors_of = zip(*(zip(*sorted(found[length]), strict=True) for length in lengths), strict=True)
    return ByLength(plane=plane, lengths=lengths, rows=rows_of, factors=factors_of)


def typical(values: Sequence[float]) -> float:
    """Return the mean without the values that lie farthest out, which are above 10 times the median and above 3 ms.
    Short ops often take three times their median, because a thread waits for the interpreter, and these belong to the
    mean, which is what a pass takes; but nothing takes 10 times the median by itself. Of two values the smaller one is
    the median."""
    limit = _FAR_OUT * median_low(values)
    return float(np.mean([value for value in values if value <= max(limit, _SHORT_S)]))


def typical_by_features(samples: Sequence[Sample]) -> dict[tuple[float, ...], float]:
    grouped: dict[tuple[float, ...], list[float]] = defaultdict(list)
    for features, seconds in samples:
        grouped[tuple(features)].append(seconds)
    return {features: typical(values) for features, values in grouped.items()}


def relative_spread(samples: Sequence[Sample]) -> float:
    """Return how far repeated measurements lie apart: the median over the points of (75th - 25th percentile) /
    median."""
    grouped: dict[tuple[float, ...], list[float]] = defaultdict(list)
    for features, seconds in samples:
        grouped[tuple(features)].append(seconds)
    spreads = [np.subtract(*np.percentile(v, [75, 25])) / max(np.median(v), 1e-12) for v in grouped.values()]
    return float(np.median(spreads))
