"""Simulate whole runs, pass after pass, beside the one batch with some steps that the other reports have of them.

A run is all requests: one batch for those who take as many as host memory holds, and many for those who take fewer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from paper_figures.moegen.rows import Row, computed, find
from paper_figures.moegen.settings import Case
from paper_figures.moegen.text import number
from paper_figures.support import markdown_table

NOTE = "prompts of 512 tokens (synthetic); both sides simulated, with the same policy"
ALL_PASSES = "all passes"
BATCHES = (
    Case(system="MoE-Gen(H)", setting="C1", model="mixtral-8x7b"),
    Case(system="MoE-Lightning", setting="C1", model="mixtral-8x7b"),
    Case(system="DeepSpeed", setting="C1", model="mixtral-8x7b"),
    Case(system="MoE-Lens", setting="C1", model="mixtral-8x7b"),
    Case(system="FlexGen", setting="C1", model="mixtral-8x7b"),
    Case(system="vLLM", setting="C1", model="mixtral-8x7b", num_requests=368),
    Case(system="llama.cpp", setting="C1", model="mixtral-8x7b", num_requests=16),
    Case(system="MoE-Gen(G)", setting="C1", model="deepseek-v2-lite", g=64, num_requests=400),
    Case(system="MoE-Gen(H)", setting="C2", model="mixtral-8x22b"),
    Case(system="MoE-Gen(H)", setting="C2", model="deepseek-v2", g=64),
    Case(system="MoE-Lens", setting="C2", model="mixtral-8x22b"),
)


def whole(case: Case) -> Case:
    """Return the case of which all passes are simulated."""
    return replace(case, variant=ALL_PASSES, whole=True)


def cases() -> list[Case]:
    return [each for case in BATCHES for each in (case, whole(case))]


def compute(chosen: Sequence[Case] | None = None) -> dict[str, Any]:
    return {"label": "simulated", "rows": list(computed(cases() if chosen is None else chosen))}


def error(some: Row, run: Row, fact: str) -> float:
    """Return by how much a rate of the simulated steps is more than that of the run."""
    return float(some[fact] / run[fact] - 1)


def _pairs(rows: Sequence[Row]) -> Iterator[tuple[Row, Row]]:
    for case in BATCHES:
        some, run = find(rows, case), find(rows, whole(case))
        if some and run:
            yield some, run


def tables(data: Mapping[str, Any]) -> str:
    columns: dict[str, Any] = {
        "system": lambda of: of[0]["system"],
        "setting": lambda of: of[0]["setting"],
        "model": lambda of: of[0]["model"],
        "g": lambda of: str(of[0]["g"]),
        "sequences: batch / run": lambda of: f"{of[0]['sequences']:,} / {of[1]['sequences']:,}",
        "passes of the run": lambda of: f"{of[1]['prefill']['passes'] + of[1]['decode']['passes']:,}",
    }
    for fact, title in (("prefill_tok_s", "prefill"), ("decode_tok_s", "decode"), ("tok_s", "both phases")):
        columns[f"{title}, tok/s: some steps / run"] = lambda of, fact=fact: " / ".join(number(r[fact]) for r in of)
        columns[f"{title}: error"] = lambda of, fact=fact: f"{error(*of, fact):+.2%}"
    return (
        f"# What simulating some steps gets wrong (simulated)\n\n{markdown_table(columns, list(_pairs(data['rows'])))}"
    )
