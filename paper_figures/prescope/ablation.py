"""Simulate PreScope's Fig. 15: the throughput that is lost without each of its parts."""

from __future__ import annotations

from typing import Any

from paper_figures.prescope.cases import BATCHES, GPUS, MODELS, OURS, all_cases, computed, find
from paper_figures.prescope.published import LOST
from paper_figures.support import markdown_table


def compute() -> dict[str, Any]:
    return {"label": "simulated", "rows": computed("ablation", all_cases(OURS))}


def lost(rows: list[dict[str, Any]], gpu: str, model: str, batch: int, variant: str) -> float | None:
    """Return the share of PreScope's throughput that a variant loses; None where either was not simulated."""
    whole, part = (find(rows, system, gpu, model, batch) for system in ("PreScope", variant))
    return 1 - part["tok_s"] / whole["tok_s"] if whole and part else None


def tables(data: dict[str, Any]) -> str:
    def cell(of: tuple[str, str, int], variant: str) -> str:
        found, published = lost(data["rows"], *of, variant), LOST.get((*of, variant))
        text = "-" if found is None else f"{found:.0%}"
        return text if published is None else f"{text} ({published:.0%})"

    columns: dict[str, Any] = {"GPU, model, batch": lambda of: ", ".join(map(str, of))}
    for variant in list(OURS)[1:]:
        columns[variant] = lambda of, variant=variant: cell(of, variant)
    places = [(gpu, model, batch) for gpu in GPUS for model in MODELS for batch in BATCHES]
    told = "# PreScope, Fig. 15: throughput lost without a part, and published in brackets (simulated)"
    return f"{told}\n\n{markdown_table(columns, places)}\nThe paper tells 20 to 54 % in all.\n"
