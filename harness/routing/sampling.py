"""Draw distinct experts: the first k of a race, which is Gumbel top-k sampling without replacement.

Expert e arrives after E_e / rate_e with E_e exponential; -log of that time is log(rate_e) plus Gumbel noise.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from harness.routing.counters import Keys
from kernels import routing

_CHUNK = 1 << 15  # numbers worked on at a time: they stay in the cache


def race(keys: Keys, num_experts: int, k: int, inverse_rates: NDArray[np.float64] | None = None) -> NDArray[np.int64]:
    """Return the first `k` of `num_experts` for each key [n] as [n, k], the fastest first. Without rates all are
    equally fast; an expert whose inverse rate is infinite never arrives (at least k must be finite)."""
    step = max(1, _CHUNK // num_experts)
    if inverse_rates is None or len(keys) <= step:
        return routing.race(keys, num_experts, k, inverse_rates)
    parts = [routing.race(keys[at : at + step], num_experts, k, inverse_rates) for at in range(0, len(keys), step)]
    return np.concatenate(parts)
