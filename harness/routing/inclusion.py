"""Compute how often an expert is among k that are drawn by weight, and the weights that give asked frequencies.

To draw one after another from those left is to take the first of a race in which expert e arrives after an exponential
time whose rate is its weight: Gumbel top-k.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_LOG_STEP = 0.4  # trapezoids over log time: the error falls as exp(-π² / step), 1e-10 here
_CLOSE = 1e-5
_MAX_ROUNDS = 200


def inclusion(rates: Floats, k: int) -> Floats:
    """Return the probability [experts] that each is among `k` drawn by weight, which are the rates of the race.

    For expert e it is ∫ rate_e exp(-rate_e t) P(fewer than k of the others have arrived by t) dt.
    """
    runs = rates > 0
    if int(runs.sum()) <= k:
        return runs.astype(np.float64)
    log_t = _log_times(rates, k)
    arrived = -np.expm1(-rates[:, None] * np.exp(log_t))  # [experts, times]
    before = _counts(arrived, k)  # [experts, k, times]: exactly j of the experts with smaller ids
    after = _counts(arrived[::-1], k)[::-1].cumsum(axis=1)  # at most j of those with larger ids
    fewer = np.einsum("ejt,ejt->et", before, after[:, ::-1])
    density = rates[:, None] * np.exp(log_t) * (1.0 - arrived)
    return np.asarray((density * fewer).sum(axis=1) * _LOG_STEP)


def weights_for(shares: Floats, k: int) -> Floats:
    """Return weights [experts] that give each expert the asked share of all choices; the shares sum to 1.

    No share may exceed 1 / k, since a token chooses an expert at most once. An expert that is always chosen comes out
    in all but one of a million tokens.
    """
    wanted = np.minimum(shares * k, 1.0 - 1e-6)
    rates = -np.log1p(-wanted)  # the rates for independent arrivals: already close where k is large
    for _ in range(_MAX_ROUNDS):
        got = inclusion(rates, k)
        if np.abs(got - wanted).max() < _CLOSE:
            break
        runs = rates > 0
        rates[runs] *= np.log1p(-wanted[runs]) / np.log1p(-np.clip(got[runs], 1e-300, 1.0 - 1e-9))
        rates /= rates.sum()
    return rates


def _log_times(rates: Floats, k: int) -> Floats:
    """Return the times (their logarithms) to integrate over. Before the first of them hardly any expert has arrived;
    after the last, k of the k + 1 fastest surely have."""
    fastest_last = np.sort(rates)[-(k + 1)]
    return np.arange(np.log(1e-10 / rates.max()), np.log(40.0 / fastest_last) + _LOG_STEP, _LOG_STEP)


def _counts(arrived: Floats, k: int) -> Floats:
    """Return the probability [experts, k, times] that exactly j < k of the experts before this one have arrived."""
    counts = np.zeros((len(arrived), k, arrived.shape[1]))
    counts[0, 0] = 1.0
    for e in range(1, len(arrived)):
        p = arrived[e - 1]
        counts[e] = counts[e - 1] * (1.0 - p)
        counts[e, 1:] += counts[e - 1, :-1] * p
    return counts
