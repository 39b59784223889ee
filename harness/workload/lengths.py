"""Prompt lengths that have a published mean and maximum.

Papers publish two numbers per workload. A distribution over the integers min..max with exactly that mean is fitted by
bisection on its one free parameter; each family's mean grows with it, from min to max, so that a fit always exists:

lognormal    log(length - min + 1) is normal with the given sigma; fitted: its location, as the weights' power below.
max_entropy  weight exp(tilt · length), the distribution of largest entropy for min, mean and max; fitted: the tilt.
constant     all weight on max.

Lengths are drawn stratified: of every block of consecutive draws, each falls in another of the equally likely slices
of the distribution, in random order. So a run of a few dozen requests already has the published mean.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import numpy as np
from numpy.typing import NDArray

from harness.workload.config import LengthStatistics
from harness.workload.streams import Stream, generator

BLOCK = 64  # strata in a block; a published list of up to LARGEST_BLOCK prompts is one block
LARGEST_BLOCK = 256

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


def fitted(statistics: LengthStatistics) -> tuple[Integers, Floats]:
    """Fit lengths min..max and their probabilities, whose mean is `statistics.mean`. Both are [max - min + 1]."""
    lengths = np.arange(statistics.min, statistics.max + 1)
    if statistics.shape == "constant" or statistics.mean >= statistics.max:
        return lengths, (lengths == statistics.max).astype(np.float64)
    if statistics.mean <= statistics.min:
        return lengths, (lengths == statistics.min).astype(np.float64)
    low, high = -1e6, 1e6  # at either end, all weight is on min or on max
    for _ in range(120):  # halves until the interval is below a float's resolution
        middle = (low + high) / 2
        too_short = _probabilities(statistics, lengths, middle) @ lengths < statistics.mean
        low, high = (middle, high) if too_short else (low, middle)
    return lengths, _probabilities(statistics, lengths, high)


def _probabilities(statistics: LengthStatistics, lengths: Integers, parameter: float) -> Floats:
    if statistics.shape == "lognormal":
        log = np.log(lengths - statistics.min + 1.0)
        weights = parameter * log - log**2 / (2 * statistics.sigma**2)  # location = (parameter + 1) sigma²
    else:
        weights = parameter * (lengths - statistics.mean)
    probabilities: Floats = np.exp(weights - weights.max())
    probabilities /= probabilities.sum()
    return probabilities


def drawn_lengths(statistics: LengthStatistics, seed: int, stream: Stream = Stream.LENGTHS) -> Iterator[int]:
    """Draw lengths without end, and the same sequence for the same seed."""
    lengths, probabilities = fitted(statistics)
    cumulative = np.cumsum(probabilities)
    size = statistics.num_prompts or BLOCK
    size = size if size <= LARGEST_BLOCK else BLOCK
    for block in count():
        rng = generator(seed, stream, block)
        quantiles = (rng.permutation(size) + rng.random(size)) / size
        drawn = np.searchsorted(cumulative, quantiles, side="right")
        yield from lengths[np.minimum(drawn, len(lengths) - 1)].tolist()  # cumulative[-1] may be a hair below 1
