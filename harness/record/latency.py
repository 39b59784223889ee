"""Measure how long requests wait for the first token, between tokens, and for the last, over all finished requests of a
run.

The definitions are those of vLLM's serving benchmark. All requests of a run arrive before its first pass (an offline
batch), so that every time counts from there and includes the time in the queue.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

ARRIVAL = "offline batch, all requests at time 0: includes queueing"
_PERCENTILES = (50, 90, 99)


def latency(token_times_s: Sequence[Sequence[float]], start_s: float) -> dict[str, Any] | None:
    """Return mean and percentiles of each latency in seconds; None where no request finished.

    `token_times_s` holds, for each finished request, the time at which each of its tokens was there; `start_s` is when
    all requests arrived.

    * `ttft_s`, time to first token: from the arrival until the first token.
    * `tpot_s`, time per output token of a request: from its first token to its last, divided by the tokens after the
      first. A request of one token has none.
    * `itl_s`, inter-token latency: each gap between neighbouring tokens of one request, preemptions included.
    * `e2e_s`, end to end: from the arrival until the last token.
    """
    if not token_times_s:
        return None
    times_s = [np.asarray(each) for each in token_times_s]
    longer = [each for each in times_s if len(each) > 1]
    gaps_s = np.concatenate([np.diff(each) for each in longer]) if longer else np.empty(0)
    return {
        "arrival": ARRIVAL,
        "num_requests": len(times_s),
        "ttft_s": _spread(np.asarray([each[0] - start_s for each in times_s])),
        "tpot_s": _spread(np.asarray([(each[-1] - each[0]) / (len(each) - 1) for each in longer])),
        "itl_s": _spread(gaps_s),
        "e2e_s": _spread(np.asarray([each[-1] - start_s for each in times_s])),
    }


def _spread(values_s: np.ndarray) -> Mapping[str, float] | None:
    """Return mean and percentiles, which lie between two neighbouring values by their distance, as numpy's default has
    it."""
    if not len(values_s):
        return None
    found = np.percentile(values_s, _PERCENTILES)
    return {"mean": float(values_s.mean())} | {f"p{p}": float(v) for p, v in zip(_PERCENTILES, found, strict=True)}
