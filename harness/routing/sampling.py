"""Draw distinct experts: the first k of a race, which is Gumbel top-k sampling without replacement.

Expert e arrives after E_e / rate_e with E_e exponential; -log of that time is log(rate_e) plus Gumbel noise.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from harness.routing.counters import Keys, derive, fractions

_CHUNK = 1 << 15  # numbers worked on at a time: they stay in the cache


def race(keys: Keys, num_experts: int, k: int, inverse_rates: NDArray[np.float64] | None = None) -> NDArray[np.int64]:
    """Return the first `k` of `num_experts` for each key [n] as [n, k], the fastest first. Without rates all are
    equally fast; an expert whose inverse rate is infinite never arrives (at least k must be finite)."""
    lanes = np.arange(num_experts)
    chosen = np.empty((len(keys), k), dtype=np.int64)
    step = max(1, _CHUNK // num_experts)
    for at in range(0, len(keys), step):
        numbers = derive(keys[at : at + step, None], lanes)  # [rows, experts]
        if inverse_rates is not None:
            numbers = (-np.log(fractions(numbers)) * inverse_rates).view(np.uint64)  # positive floats sort as integers
        chosen[at : at + step] = _smallest(numbers, k)
    return chosen


def _smallest(numbers: NDArray[np.uint64], k: int) -> NDArray[np.int64]:
    """Return the columns of the `k` smallest of each row, ascending. The column takes the place of the lowest bits:
    whole numbers are then sorted rather than indices, which is several times faster, and ties have an order."""
    num_columns = numbers.shape[1]
    low = np.uint64((1 << (num_columns - 1).bit_length()) - 1)
    numbers = (numbers & ~low) | np.arange(num_columns, dtype=np.uint64)
    smallest = np.partition(numbers, k - 1, axis=1)[:, :k]
    smallest.sort(axis=1)
    return (smallest & low).astype(np.int64)
