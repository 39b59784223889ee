"""Decide which experts the GPU gets, on demand or by prefetch: PreScope's cross-layer cost model (§4.3). Torch-free.

The formulas (2) and (4)-(7) are missing from the paper's text as it can be read; these are reconstructed from what it
says of them. The link is one serial queue (premise 4), and an expert's computation on the GPU hides behind the transfer
of the next one, but for the last (premise 5).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class Costs(Protocol):
    """Says what things take, in seconds: see `strategies.expert_offload.costs.ExpertCosts`."""

    @property
    def io_s(self) -> float: ...

    def cpu_s(self, tokens: float) -> float: ...

    def gpu_s(self, tokens: float) -> float: ...


@dataclass(frozen=True, kw_only=True)
class Pending:
    """Names an expert that is not on the device, with its tokens: those it has, or those it is expected to have.

    `chance` is the probability that it has any (P_hit); on the CPU it costs its start-up only then.
    """

    expert: int
    tokens: float
    chance: float = 1.0

    def cpu_s(self, costs: Costs) -> float:
        start_s = costs.cpu_s(0.0)
        return self.chance * start_s + costs.cpu_s(self.tokens) - start_s  # (3)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Holds the experts that are brought on demand and those that are prefetched, each in the order of their transfers.

    `queued` is how many experts of the later layer are worth a transfer, and `layer_s` how long the current layer is
    thought to take from the router's answer on.
    """

    on_demand: tuple[int, ...]
    prefetch: tuple[int, ...]
    queued: int
    layer_s: float


def gpu_queue(
    costs: Costs, current: Sequence[Pending], following: Sequence[Pending], *, busy_s: float, attention_s: float
) -> tuple[int, int]:
    """Answer Q1: return how many of the heaviest experts of either layer go to the GPU.

    Both lists ascend by tokens. They are merged, and from the heaviest on an expert goes to the GPU as long as it would
    be there and computed before the CPU has computed it with all lighter ones. What that gives the current layer is
    checked again on that layer alone.
    """
    merged = sorted(
        [(each.tokens, 1, each) for each in current] + [(each.tokens, 0, each) for each in following],
        key=lambda row: row[:2],
    )
    layers = [row[1] for row in merged]
    cost_s = [row[2].cpu_s(costs) for row in merged]
    extra_s = attention_s if following else 0.0
    queued = _moved(costs, [row[0] for row in merged], cost_s, busy_s=busy_s, extra_s=extra_s)  # (4)
    num_current = sum(layers[len(layers) - queued :])
    own_s = [seconds for seconds, is_current in zip(cost_s, layers, strict=True) if is_current]
    alone = _moved(costs, [each.tokens for each in current], own_s, busy_s=busy_s, extra_s=0.0)  # (5)
    return min(num_current, alone), queued - num_current


def _moved(costs: Costs, tokens: Sequence[float], cpu_s: Sequence[float], *, busy_s: float, extra_s: float) -> int:
    """Return how many of the last experts go to the GPU, which begins to load after `busy_s`. The CPU has `extra_s`
    more time than its experts take."""
    left_s, moved = sum(cpu_s), 0
    for at in reversed(range(len(cpu_s))):
        if busy_s + (moved + 1) * costs.io_s + costs.gpu_s(tokens[at]) >= left_s + extra_s:
            break
        left_s -= cpu_s[at]
        moved += 1
    return moved


def schedule(
    costs: Costs, current: Sequence[Pending], following: Sequence[Pending], *, busy_s: float, attention_s: float,
    gpu_busy_s: float = 0.0, most_prefetches: int | None = None,
) -> Schedule:  # fmt: skip
    """Place the experts of the current layer that are not on the device, and choose what to prefetch (Algorithm 1).

    `current` and `following` have the experts of both layers that are neither there nor on their way, in any order.
    `busy_s` (d) is how long the link is still bound, `attention_s` (T_attn) what lies between the two layers' experts,
    `gpu_busy_s` what the GPU computes without waiting for the link. There is room for `most_prefetches`.
    """
    current = sorted(current, key=lambda each: (each.tokens, -each.expert))
    following = sorted(following, key=lambda each: (each.tokens, -each.expert))
    if most_prefetches is not None:  # what cannot be prefetched must not keep this layer's experts on the CPU
        following = following[max(0, len(following) - most_prefetches) :]
    moved, queued = gpu_queue(costs, current, following, busy_s=busy_s, attention_s=attention_s)
    loaded, left = current[len(current) - moved :], current[: len(current) - moved]
    layer_s = _layer_s(costs, left, loaded, busy_s=busy_s, gpu_busy_s=gpu_busy_s)
    link_free_s = busy_s + moved * costs.io_s
    worth = following[::-1][:queued]
    number = num_prefetches(costs, layer_s + attention_s - link_free_s, worth)
    return Schedule(
        on_demand=tuple(each.expert for each in reversed(loaded)),
        prefetch=tuple(each.expert for each in worth[:number]),
        queued=queued,
        layer_s=layer_s,
    )


def num_prefetches(costs: Costs, gap_s: float, queued: Sequence[Pending]) -> int:
    """Answer Q2 and Q3: return how many of the queued prefetches, the first ones, to issue into a gap of the link.

    The last one may overrun the gap by `o` and then delays the next layer's experts on demand: it is worth it only if
    it is likely enough to be right.
    """
    number = max(0, min(len(queued), _nearest(gap_s / costs.io_s)))  # (6)
    overrun_s = number * costs.io_s - gap_s
    if number and overrun_s > 0:
        likely = queued[number - 1].chance
        gain_s = likely * (costs.io_s - overrun_s) - (1 - likely) * overrun_s  # (7)
        number -= gain_s <= 0
    return number


def _nearest(value: float) -> int:
    return int(value + 0.5) if value > 0 else 0


def _layer_s(
    costs: Costs, on_cpu: Sequence[Pending], loaded: Sequence[Pending], *, busy_s: float, gpu_busy_s: float
) -> float:
    """Return the seconds until both sides have finished: the maximum of CPU and GPU."""
    cpu_s = sum(each.cpu_s(costs) for each in on_cpu)
    last_s = min((costs.gpu_s(each.tokens) for each in loaded), default=0.0)
    link_s = busy_s + len(loaded) * costs.io_s + last_s if loaded else 0.0
    return max(cpu_s, link_s, gpu_busy_s)
