"""Independent random streams of one seed: what one part of a workload draws never shifts what another part draws."""

from __future__ import annotations

from enum import IntEnum

import numpy as np


class Stream(IntEnum):
    LENGTHS = 0
    SENTENCES = 1
    TOKENS = 2
    REASONING = 3
    SHOTS = 4
    OUTPUTS = 5


def generator(seed: int, stream: Stream, index: int = 0) -> np.random.Generator:
    """Return the generator for item `index` of a stream, the same whatever was drawn before."""
    return np.random.default_rng([seed, stream, index])
