"""Draw the first of many random arrivals, in C++ since a simulated run draws them for every token and layer.

What is drawn is said in `harness/routing/sampling.py`; this module checks arguments and hands addresses on. Torch-free.
"""

from __future__ import annotations

import numpy as np

from kernels._extension import native


def race(keys: np.ndarray, num_columns: int, k: int, inverse_rates: np.ndarray | None = None) -> np.ndarray:
    """Return the `k` columns that arrive first for each key, uint64 [n], as int64 [n, k], ascending. Arrivals are the
    numbers of the key's stream or, with `inverse_rates` [num_columns], their exponential times. Raises ValueError where
    there are fewer columns than `k`, or another number of rates."""
    if not 1 <= k <= num_columns:
        raise ValueError(f"k must lie between 1 and the {num_columns} columns, got {k}")
    keys = np.ascontiguousarray(keys, dtype=np.uint64)
    chosen = np.empty((len(keys), k), dtype=np.int64)
    if inverse_rates is None:
        native().race_by_numbers(_address(keys), len(keys), num_columns, k, _address(chosen))
        return chosen
    if inverse_rates.shape != (num_columns,):
        raise ValueError(f"one inverse rate for each of {num_columns} columns, got {inverse_rates.shape}")
    rates = np.ascontiguousarray(inverse_rates, dtype=np.float64)
    logs = np.empty((len(keys), num_columns))
    native().race_fractions(_address(keys), len(keys), num_columns, _address(logs))
    np.log(logs, out=logs)  # numpy's own logarithm, whose last bit may differ from the C library's
    native().race_by_arrivals(_address(logs), _address(rates), len(keys), num_columns, k, _address(chosen))
    return chosen


def _address(array: np.ndarray) -> int:
    return int(array.ctypes.data)
