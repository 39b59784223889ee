"""Draw different columns at random, in C++ since a simulated run draws experts for every token and layer. Torch-free.

One column after another is drawn from those that are left: which of a key's columns comes i-th depends on number i of
the key's stream (`harness/routing/counters.py`) and on those before it.
"""

from __future__ import annotations

import numpy as np

from kernels._extension import native


def draw(keys: np.ndarray, num_columns: int, k: int, weights: np.ndarray | None = None) -> np.ndarray:
    """Return `k` different columns for each key, uint64 [n], as int64 [n, k], in the order in which they are drawn.

    Each is drawn in proportion to `weights` [num_columns] of those that are left, or evenly without weights. Descending
    weights keep rounding smallest. Raises ValueError where fewer than `k` columns can be drawn, or for other weights.
    """
    if not 1 <= k <= num_columns:
        raise ValueError(f"k must lie between 1 and the {num_columns} columns, got {k}")
    keys = np.ascontiguousarray(keys, dtype=np.uint64)
    drawn = np.empty((len(keys), k), dtype=np.int64)
    if weights is None:
        native().draw_evenly(keys.ctypes.data, len(keys), num_columns, k, drawn.ctypes.data)
    else:
        tails = _tails(weights, num_columns, k)
        native().draw_by_weight(keys.ctypes.data, tails.ctypes.data, len(keys), num_columns, k, drawn.ctypes.data)
    return drawn


def _tails(weights: np.ndarray, num_columns: int, k: int) -> np.ndarray:
    """Return the sums of `weights` from each column on, and 0 behind the last: [num_columns + 1]."""
    if weights.shape != (num_columns,):
        raise ValueError(f"weights must be one for each of {num_columns} columns, got {weights.shape}")
    tails = np.zeros(num_columns + 1)
    tails[:-1] = np.cumsum(weights[::-1], dtype=np.float64)[::-1]
    if not (np.isfinite(tails[0]) and (weights >= 0).all()):
        raise ValueError("weights must be finite and >= 0")
    if (can_be := np.count_nonzero(tails[:-1] > tails[1:])) < k:
        raise ValueError(f"weights must be above 0 for {k} columns or more, got {can_be}")
    return tails
