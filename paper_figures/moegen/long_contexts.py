"""Simulate MoE-Gen's Table 8: prompts and generations of thousands of tokens, Mixtral-8x7B on C1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paper_figures.moegen.published import TABLE8, TABLE8_SHAPES
from paper_figures.moegen.rows import Row, computed, find
from paper_figures.moegen.settings import LIMITS, SYSTEMS, Case
from paper_figures.moegen.text import number, pair
from paper_figures.support import markdown_table

NOTE = "Mixtral-8x7B, C1 (A5000, 256 GB), LongBench's lengths of the paper; published: MoE-Gen Table 8"
Shape = tuple[int, int, int]


def cases(shapes: Sequence[Shape] = TABLE8_SHAPES, systems: Sequence[str] = tuple(SYSTEMS)) -> list[Case]:
    return [_case(system, shape) for shape in shapes for system in systems]


def _case(system: str, shape: Shape) -> Case:
    prompt, g, num_requests = shape
    return Case(system=system, setting="C1", model="mixtral-8x7b", prompt=prompt, g=g, num_requests=num_requests)


def compute(chosen: Sequence[Case] | None = None) -> dict[str, Any]:
    return {"label": "simulated", "rows": list(computed(cases() if chosen is None else chosen))}


def row_of(rows: Sequence[Row], system: str, shape: Shape) -> Row | None:
    return find(rows, _case(system, shape))


def tables(data: dict[str, Any]) -> str:
    def cell(system: str, shape: Shape, phase: int) -> str:
        published = TABLE8[system][TABLE8_SHAPES.index(shape)][phase] if system in TABLE8 else None
        found = row_of(data["rows"], system, shape)
        return pair(published, found and found[("prefill_tok_s", "decode_tok_s")[phase]])

    columns: dict[str, Any] = {"system": str}
    for shape in TABLE8_SHAPES:
        name = f"{shape[0] // 1024}K-{shape[1] // 1024}K, B = {shape[2]}"
        columns[f"{name}: prefill"] = lambda system, shape=shape: cell(system, shape, 0)
        columns[f"{name}: decode"] = lambda system, shape=shape: cell(system, shape, 1)
        columns[f"{name}: sequences"] = lambda system, shape=shape: number(
            (row_of(data["rows"], system, shape) or {}).get("sequences")
        )
    systems = [system for system in SYSTEMS if any(r["system"] == system for r in data["rows"])]
    table = markdown_table(columns, systems)
    return (
        f"# Long contexts, tok/s: published / here (simulated)\n\n{table}\n"
        "llama.cpp's prompts are one micro-batch each here; llama.cpp itself cuts them into micro-batches of 512 "
        f"tokens and copies experts for each, so that its prefill is too fast here.\n\n{LIMITS}"
    )
