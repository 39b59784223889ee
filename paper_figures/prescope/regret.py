"""Tell how far PreSched is from the best of all placements, where so few experts wait in two layers that all are tried.

The costs of an expert are drawn, or those that PreScope measured on the simulated machines (`throughput.json`). All
that is predicted comes true. Beside it stands each layer by itself (2), which is PreSched without predictions.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, combinations, product
from typing import Any

import numpy as np

from harness.record.provenance import code_version
from paper_figures.prescope.cases import FOLDER
from paper_figures.prescope.throughput import measured_costs
from paper_figures.support import markdown_table, read_json
from strategies.prescope.presched import Costs, Pending, schedule

NOTE = "computed by PreSched's own cost model, with right predictions; one to four experts wait in each of two layers"
DRAWN = "drawn costs"
_CASES = 150
_MOST_EXPERTS = 4
Tokens = Sequence[int]


@dataclass(frozen=True)
class LinearCosts:
    """The model of the paper: a transfer that does not depend on tokens, and lines of the CPU and the GPU. Seconds."""

    io_s: float = 1.0
    gpu: float = 0.2
    alpha: float = 0.1
    sigma: float = 0.1
    gpu_token: float = 0.0

    def cpu_s(self, tokens: float) -> float:
        return self.alpha * tokens + self.sigma

    def gpu_s(self, tokens: float) -> float:
        return self.gpu + self.gpu_token * tokens


def pending(tokens: Tokens) -> list[Pending]:
    """Return experts 0, 1, ... with so many tokens."""
    return [Pending(expert=number, tokens=float(n)) for number, n in enumerate(tokens)]


def _subsets(number: int) -> Iterator[tuple[int, ...]]:
    return chain.from_iterable(combinations(range(number), size) for size in range(number + 1))


def layer_end_s(costs: Costs, tokens: Tokens, loaded: Collection[int], busy_s: float) -> float:
    """Return when both sides have finished, if the experts of `loaded` are brought one after another, the lightest
    last."""
    cpu_s = sum(costs.cpu_s(n) for at, n in enumerate(tokens) if at not in loaded)
    return max(cpu_s, busy_s + len(loaded) * costs.io_s + _last_s(costs, tokens, loaded) if loaded else 0.0)


def _last_s(costs: Costs, tokens: Tokens, brought: Collection[int]) -> float:
    return min(costs.gpu_s(tokens[at]) for at in brought)


def best_layer_s(costs: Costs, tokens: Tokens, busy_s: float) -> float:
    """Return the shortest time of one layer, over all ways to load some of its experts."""
    return min(layer_end_s(costs, tokens, chosen, busy_s) for chosen in _subsets(len(tokens)))


def two_layers_s(
    costs: Costs, first: Tokens, second: Tokens, loaded: Collection[int], prefetched: Collection[int], *,
    busy_s: float, attention_s: float,
) -> float:  # fmt: skip
    """Return when the second layer has finished. Prefetches follow the first layer's loads; what is left is placed
    best."""
    link_s = busy_s + (len(loaded) + len(prefetched)) * costs.io_s
    start_s = layer_end_s(costs, first, loaded, busy_s) + attention_s
    left, late_s = [n for at, n in enumerate(second) if at not in prefetched], max(0.0, link_s - start_s)
    last_s = late_s + _last_s(costs, second, prefetched) if prefetched else 0.0
    return start_s + max(best_layer_s(costs, left, late_s), last_s)


def optimum_s(costs: Costs, first: Tokens, second: Tokens, **times: float) -> float:
    """Return the shortest time of both layers, over all loads of the first and prefetches of the second."""
    choices = product(_subsets(len(first)), _subsets(len(second)))
    return min(two_layers_s(costs, first, second, a, b, **times) for a, b in choices)


def regrets(costs: Costs, first: Tokens, second: Tokens, **times: float) -> tuple[float, float]:
    """Return by which share of the optimum PreSched is longer, and each layer by itself."""
    best_s, found = optimum_s(costs, first, second, **times), []
    for known in (pending(second), []):
        plan = schedule(costs, pending(first), known, **times)
        reached_s = two_layers_s(costs, first, second, plan.on_demand, plan.prefetch, **times)
        found.append(reached_s / best_s - 1)
    return found[0], found[1]


def compute() -> dict[str, Any]:
    rows = [_row(DRAWN, None)]
    for place, told in measured_costs(read_json(FOLDER / "throughput.json")["rows"]).items():
        gpu = told["gpu_s"] - told["gpu_token_s"]
        costs = LinearCosts(told["io_s"], gpu, told["cpu_token_s"], told["cpu_start_s"], told["gpu_token_s"])
        rows.append(_row(", ".join(place), costs))
    return {"label": "simulated", "code": code_version(), "rows": rows}


def _row(name: str, measured: LinearCosts | None) -> dict[str, Any]:
    """Draw cases. Experts have up to 20 tokens where costs are drawn too, and else up to twice as many as the CPU
    computes while one is brought."""
    rng, found = np.random.default_rng(0), []
    for _ in range(_CASES):
        costs = measured or LinearCosts(
            alpha=rng.uniform(0.01, 0.3), sigma=rng.uniform(0, 0.3), gpu=rng.uniform(0.05, 0.5)
        )
        most = 20 if measured is None else max(2, round(2 * (costs.io_s - costs.sigma) / costs.alpha))
        first, second = (
            sorted(rng.integers(1, most, rng.integers(1, _MOST_EXPERTS + 1)).tolist()) for _ in range(2)
        )  # fmt: skip
        times = {"busy_s": costs.io_s * rng.uniform(0, 1), "attention_s": costs.io_s * rng.uniform(0, 1)}
        found.append(regrets(costs, first, second, **times))
    ours, alone = np.array(found).T
    return {"costs": name, "cases": _CASES, "presched": _told(ours), "by layer": _told(alone)}


def _told(regret: np.ndarray) -> dict[str, float]:
    return {"mean": float(regret.mean()), "p90": float(np.percentile(regret, 90)), "worst": float(regret.max())}


def tables(data: Mapping[str, Any]) -> str:
    """Write mean, 90th percentile and worst regret."""
    columns: dict[str, Any] = {"costs": lambda row: row["costs"], "cases": lambda row: str(row["cases"])}
    for who in ("presched", "by layer"):
        columns[f"{who}: mean, 90th percentile, worst"] = lambda row, who=who: ", ".join(
            f"{each:.1%}" for each in row[who].values()
        )
    return f"# Longer than the best of all placements of two layers (simulated)\n\n{NOTE}.\n\n" + markdown_table(
        columns, data["rows"]
    )
