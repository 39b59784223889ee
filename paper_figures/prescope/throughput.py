"""Simulate PreScope's Fig. 12 and 14: tokens a second and seconds per output token, beside other systems."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paper_figures.prescope.cases import BATCHES, GPUS, MODELS, OTHERS, all_cases, computed, find
from paper_figures.prescope.published import LATENCY_V100, THROUGHPUT_A100_64
from paper_figures.support import markdown_table

SYSTEMS = ("PreScope", *OTHERS)


def compute() -> dict[str, Any]:
    return {"label": "simulated", "rows": computed("throughput", all_cases(SYSTEMS))}


def tables(data: dict[str, Any]) -> str:
    rows = data["rows"]
    parts = ["# PreScope, Fig. 12: tok/s, and published in brackets (simulated)\n"]
    parts += [_table(rows, gpu, model) for gpu in GPUS for model in MODELS]
    return "\n".join([*parts, _latency(rows)])


def _table(rows: Sequence[dict[str, Any]], gpu: str, model: str) -> str:
    def cell(system: str, batch: int) -> str:
        found = find(rows, system, gpu, model, batch)
        text = f"{found['tok_s']:.3g}" if found else "-"
        published = THROUGHPUT_A100_64.get(model) if (gpu, batch, system) == ("A100", 64, "PreScope") else None
        return text if published is None else f"{text} ({published:g})"

    columns: dict[str, Any] = {"system": str}
    for batch in BATCHES:
        columns[str(batch)] = lambda system, batch=batch: cell(system, batch)
    columns["experts on the device, batch 64"] = lambda system: _hits(rows, system, gpu, model)
    return f"## {gpu}, {model}\n\n{markdown_table(columns, SYSTEMS)}"


def _hits(rows: Sequence[dict[str, Any]], system: str, gpu: str, model: str) -> str:
    """Tell where active experts were, and the bytes of prefetches that came to nothing."""
    found = find(rows, system, gpu, model, 64)
    if not found or not found["counted"]:
        return "-"
    counted = found["counted"]
    ways = ", ".join(f"{way} {counted[way] / counted['active']:.0%}" for way in ("resident", "prefetched", "cpu"))
    return f"{ways}, wasted {counted['wasted_bytes'] / 1e9:.3g} GB"


def _latency(rows: Sequence[dict[str, Any]]) -> str:
    columns: dict[str, Any] = {
        "model, batch": lambda of: f"{of[0]}, {of[1]}",
        "published": lambda of: f"{LATENCY_V100[of]:g}",
        "here": lambda of: f"{found['token_s']:.3g}" if (found := find(rows, "PreScope", "V100", *of)) else "-",
    }
    return f"## Fig. 14, V100: seconds per output token of PreScope\n\n{markdown_table(columns, LATENCY_V100)}"
