"""Compare the policy that MoE-Gen's search finds with the best one of a grid, by the same costs and equations.

The search goes along one variable after another; here all combinations of a few values are tried. Nothing is simulated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

from harness.run.session import Session
from harness.settings import load_strategy
from paper_figures.moegen.settings import Case
from paper_figures.moegen.text import number
from paper_figures.pool import each
from paper_figures.support import composed, markdown_table
from strategies.moegen import profiled_search
from strategies.moegen.planner import Deployment, complete_by_memory
from strategies.moegen.policy import Policy
from strategies.moegen.search import Candidate, Search

NOTE = "predicted seconds a request, by MoE-Gen's search and by enumeration"
_C2 = Case(system="MoE-Gen(H)", setting="C2", model="mixtral-8x7b")
CASES = (  # as profiled, and with the CPU that the paper's best share of 0.6 tells
    _C2,
    Case(system="MoE-Gen(H)", setting="C2", model="mixtral-8x22b"),
    Case(system="MoE-Gen(H)", setting="C3", model="mixtral-8x7b"),
    Case(system="MoE-Gen(H)", setting="C2", model="deepseek-v2-lite", num_requests=4000),
    replace(_C2, variant="the CPU reads 15 GB/s", more=("hardware.cpu_gb_s=15", "hardware.cpu_gflop_s=60")),
)
Grid = Mapping[tuple[str, str], Sequence[float]]
GRID: Grid = {  # phase ("" for both) and variable -> values
    ("decode", "cpu_attention"): (0.0, 0.3, 0.6, 0.8, 1.0),
    ("decode", "attention_batch"): (128, 256, 512),
    ("prefill", "batch_size"): (16, 32, 64),
    ("prefill", "attention_batch"): (16, 32),
    ("prefill", "expert_batch"): (4096, 8192),
    ("", "expert_slots"): (2, 8),
}


def enumerated(search: Search, start: Policy, grid: Grid = GRID) -> Iterator[Candidate]:
    """Yield every policy of the grid that fits, with as many experts on the device as there is room for."""
    for values in product(*grid.values()):
        policy = start
        for (phase, name), value in zip(grid, values, strict=True):
            changed: Any = replace(getattr(policy, phase) if phase else policy, **{name: value})  # type: ignore[arg-type]
            policy = replace(policy, **{phase: changed}) if phase else changed
        policy = search.filled(policy)
        if policy.prefill.attention_batch <= policy.prefill.batch_size and search.deployment.fits(policy):
            yield search.candidate(policy)


def compute(cases: Sequence[Case] = CASES, grid: Grid = GRID) -> dict[str, Any]:
    return {"label": "predicted", "rows": list(each(partial(_row, grid=grid), cases))}


def _row(case: Case, grid: Grid) -> dict[str, Any]:
    values = composed(*case.overrides, "machine=simulated")
    session = Session.of(values)
    session.load_model()
    session.load_workload()
    session.build_machine()
    session.queue_requests()
    engine = session.build_engine()
    _, config = load_strategy(values["strategy"])
    deployment = Deployment.of(engine, padded=config.padding)
    ready = profiled_search(config, engine, deployment)
    assert ready is not None, "the machine has room for a profile"
    search, _ = ready
    start = complete_by_memory(config.policy, deployment)
    tried = list(enumerated(search, start, grid))
    best, found = min(tried, key=lambda each: each.request_s), search.around(start).best
    return {
        "setting": case.setting, "model": case.model, "variant": case.variant, "tried": len(tried),
        "searched_s": found.request_s, "enumerated_s": best.request_s,
        "searched": found.policy.as_record(), "enumerated": best.policy.as_record(),
        "command": f"python -m harness.plan {' '.join(case.overrides)}",
    }  # fmt: skip


def tables(data: dict[str, Any]) -> str:
    columns = {
        "setting": lambda r: r["setting"],
        "model": lambda r: r["model"],
        "": lambda r: r["variant"],
        "searched ω": lambda r: number(r["searched"]["cpu_attention"]),
        "policies tried": lambda r: f"{r['tried']:,}",
        "best of these, s a request": lambda r: number(r["enumerated_s"]),
        "searched, s a request": lambda r: number(r["searched_s"]),
        "searched / best": lambda r: f"{r['searched_s'] / r['enumerated_s']:.3f}",
    }
    values = "; ".join(f"{' '.join(key).strip()} {', '.join(map(number, tried))}" for key, tried in GRID.items())
    return (
        f"# The search beside an enumeration (predicted)\n\n{markdown_table(columns, data['rows'])}\n"
        f"Tried were all combinations of: {values}. The search may take values between these.\n"
    )
