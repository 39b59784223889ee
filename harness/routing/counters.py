"""Draw random numbers by counter: each is a hash of its purpose, so none depends on how many were drawn before.

The hash is SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, OOPSLA 2014): number i of
the stream with key s is mix(s + (i + 1) gamma). A number serves as the key of a further stream, counter by counter.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import ArrayLike, NDArray

Keys = NDArray[np.uint64]

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_S27, _S30, _S31, _S12 = np.uint64(27), np.uint64(30), np.uint64(31), np.uint64(12)


class Stream(IntEnum):
    """Each purpose of random numbers has a stream of its own. Values are part of the definition: changing one changes
    all results."""

    EXPERTS = 0
    POPULARITY = 1
    KEEP = 2
    FOLLOW = 3
    RENEWAL = 4
    PREDICTION = 5
    RECORDING = 6


def derive(keys: Keys, counters: ArrayLike) -> Keys:
    """Return the numbers `counters` of the streams `keys`, broadcast against each other."""
    steps = np.atleast_1d(counters).astype(np.int64).astype(np.uint64) + np.uint64(1)
    x = np.atleast_1d(keys) + steps * _GAMMA  # wraps around, silently for arrays
    x ^= x >> _S30
    x *= _MIX_1
    x ^= x >> _S27
    x *= _MIX_2
    x ^= x >> _S31
    return x


def stream(seed: int, purpose: Stream, *counters: ArrayLike) -> Keys:
    """Return the keys [n] of the streams for (seed, purpose, counters...); counters are numbers or arrays [n]."""
    keys = derive(np.array([seed % 2**64], dtype=np.uint64), purpose)
    for counter in counters:
        keys = derive(keys, counter)
    return keys


def fractions(numbers: Keys) -> NDArray[np.float64]:
    """Map numbers to uniform ones in (0, 1), both ends left out: 52 bits and a half are exact in float64."""
    return (numbers >> _S12).astype(np.float64) * 2.0**-52 + 2.0**-53
