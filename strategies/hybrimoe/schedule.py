"""Divide a layer's experts between GPU and CPU by simulating both and the link (HybriMoE, Section IV-B). Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass


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
    order = sorted(tokens, key=lambda expert: (expert not in there, not there.get(expert), -tokens[expert], expert))
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
    tokens: Mapping[int, float], there: Mapping[int, bool], times: Times, experts: Iterable[int]
) -> dict[int, float]:
    """Return how much earlier a layer would be done if one of these experts were there when it begins, by expert."""
    end_s = schedule(tokens, there, times).end_s
    return {expert: end_s - schedule(tokens, {**there, expert: True}, times).end_s for expert in experts}
