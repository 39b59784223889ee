"""Divide a layer's experts between GPU and CPU by simulating both and the link (HybriMoE, Section IV-B). Torch-free."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_Floats = NDArray[np.float64]
_ROUNDING = 1e-12  # share of a layer's time that sums in another order may differ by


@dataclass(frozen=True)
class Times:
    """Says what an expert takes: on the link, and on either side over a number of tokens."""

    io_s: float
    cpu_s: Callable[[float], float]
    gpu_s: Callable[[float], float]


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Says which side runs which experts, in which order, and when each lane is done."""

    on_gpu: tuple[int, ...]
    on_cpu: tuple[int, ...]
    gpu_end_s: float
    cpu_end_s: float
    link_end_s: float

    @property
    def end_s(self) -> float:
        return max(self.gpu_end_s, self.cpu_end_s)


def schedule(
    tokens: Mapping[int, float], there: Mapping[int, bool], times: Times, *, link_busy_s: float = 0.0
) -> Schedule:
    """Return the greedy schedule of experts with these tokens, of which some are there (True) or on their way (False).

    What is on its way arrives when the link is no longer busy. The GPU takes the experts that are there, those on their
    way, then those that have to be brought, the heaviest of each first; the CPU takes from the other end. Whichever
    side would be done earlier with its next expert takes it.
    """
    order = _order(tokens, there)
    arrived = [there.get(expert) for expert in order]
    gpu_s = cpu_s = 0.0
    link_s, first, last = link_busy_s, 0, len(order) - 1
    while first <= last:
        arrival_s = link_s + times.io_s if arrived[first] is None else 0.0 if arrived[first] else link_busy_s
        on_gpu_s = max(gpu_s, arrival_s) + times.gpu_s(tokens[order[first]])
        on_cpu_s = cpu_s + times.cpu_s(tokens[order[last]])
        if on_gpu_s <= on_cpu_s:
            gpu_s, link_s, first = on_gpu_s, max(link_s, arrival_s), first + 1
        else:
            cpu_s, last = on_cpu_s, last - 1
    return Schedule(
        on_gpu=tuple(order[:first]),
        on_cpu=tuple(reversed(order[first:])),
        gpu_end_s=gpu_s,
        cpu_end_s=cpu_s,
        link_end_s=link_s,
    )


def impacts_s(
    tokens: Mapping[int, float], there: Mapping[int, bool], times: Times, experts: Collection[int]
) -> dict[int, float]:
    """Return how much earlier a layer would be done if one of these `experts`, which have tokens, were there when it
    begins, by expert.

    This is the difference of two calls of `schedule`, computed for all experts at once: both lanes take experts in the
    order of a merge, so that the GPU runs its first ones which end no later than the rest on the CPU.
    """
    order = _order(tokens, there)
    arrived = [expert for expert in order if there.get(expert)]
    place = {expert: at for at, expert in enumerate(order)}
    asked = [expert for expert in experts if not there.get(expert)]
    orders = [list(range(len(order)))]
    for expert in asked:  # it goes among those that have arrived
        to, at = bisect(arrived, (-tokens[expert], expert), key=lambda other: (-tokens[other], other)), place[expert]
        orders.append([*range(to), at, *range(to, at), *range(at + 1, len(order))])
    to_bring = [len(order) - sum(expert in there for expert in order)]
    to_bring += [to_bring[0] - (expert not in there) for expert in asked]
    ends_s = _ends_s(np.array(orders, dtype=np.int64), np.array(to_bring), [tokens[expert] for expert in order], times)
    gains_s = ends_s[0] - ends_s[1:]
    gains_s[np.abs(gains_s) < _ROUNDING * ends_s[0]] = 0.0
    found = dict(zip(asked, gains_s.tolist(), strict=True))
    return {expert: found.get(expert, 0.0) for expert in experts}


def _ends_s(orders: NDArray[np.int64], to_bring: NDArray[np.int64], loads: list[float], times: Times) -> _Floats:
    """Return when a layer is done [orders], by the experts [orders, experts] whose last `to_bring` are not there."""
    count = orders.shape[1]
    gpu_s, cpu_s = (np.array([seconds(load) for load in loads])[orders] for seconds in (times.gpu_s, times.cpu_s))
    arrivals_s = times.io_s * np.maximum(np.arange(1 - count, 1) + to_bring[:, None], 0)
    gpu_sums_s = gpu_s.cumsum(axis=1)
    gpu_ends_s = gpu_sums_s + np.maximum.accumulate(arrivals_s - gpu_sums_s + gpu_s, axis=1)
    cpu_ends_s = cpu_s[:, ::-1].cumsum(axis=1)[:, ::-1]  # of each expert and those behind it
    on_gpu = (gpu_ends_s <= cpu_ends_s).sum(axis=1)
    rows = np.arange(len(orders))
    nothing_s = np.zeros((len(orders), 1))
    gpu_ends_s, cpu_ends_s = np.hstack([nothing_s, gpu_ends_s]), np.hstack([cpu_ends_s, nothing_s])
    return np.asarray(np.maximum(gpu_ends_s[rows, on_gpu], cpu_ends_s[rows, on_gpu]))


def _order(tokens: Mapping[int, float], there: Mapping[int, bool]) -> list[int]:
    """Return the experts in the order in which the GPU takes them."""
    return sorted(tokens, key=lambda expert: (expert not in there, not there.get(expert), -tokens[expert], expert))
