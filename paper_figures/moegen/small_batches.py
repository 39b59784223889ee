"""Simulate MoE-Gen's Table 9: batches of 1 and 32 sequences, which one expert after another hardly fills."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paper_figures.moegen.published import TABLE9, TABLE9_BATCHES
from paper_figures.moegen.rows import Row, computed, find
from paper_figures.moegen.settings import LIMITS, SYSTEMS, Case
from paper_figures.moegen.text import pair
from paper_figures.support import markdown_table

NOTE = "C1 (A5000, 256 GB), prompts of 512 tokens, 32 to decode; published: MoE-Gen Table 9"
MODELS = ("deepseek-v2-lite", "mixtral-8x7b")
G = 32


def cases(models: Sequence[str] = MODELS, systems: Sequence[str] = tuple(SYSTEMS)) -> list[Case]:
    return [_case(system, model, size) for model in models for size in TABLE9_BATCHES for system in systems]


def _case(system: str, model: str, size: int) -> Case:
    more = (f"strategy.slots={size}",) if system == "llama.cpp" else ()  # it takes four at a time by itself
    return Case(system=system, setting="C1", model=model, g=G, num_requests=size, more=more)


def compute(chosen: Sequence[Case] | None = None) -> dict[str, Any]:
    return {"label": "simulated", "rows": list(computed(cases() if chosen is None else chosen))}


def decode_tok_s(rows: Sequence[Row], system: str, model: str, size: int) -> float | None:
    found = find(rows, _case(system, model, size))
    return found and found["decode_tok_s"]


def tables(data: dict[str, Any]) -> str:
    def cell(system: str, model: str, size: int) -> str:
        of = TABLE9.get(system) if model == MODELS[0] else None
        published = of and of[TABLE9_BATCHES.index(size)]
        return pair(published, decode_tok_s(data["rows"], system, model, size))

    columns: dict[str, Any] = {"system": str}
    for model in MODELS:
        for size in TABLE9_BATCHES:
            columns[f"{model}, {size}"] = lambda system, model=model, size=size: cell(system, model, size)
    systems = [system for system in SYSTEMS if any(r["system"] == system for r in data["rows"])]
    return (
        f"# Small batches, decode tok/s: published / here (simulated)\n\n{markdown_table(columns, systems)}\n"
        f"The text that was read has lost Table 9's Mixtral columns.\n\n{LIMITS}"
    )
