"""Extrapolate MoE-Gen's Table 4 from simulated batches: hours for whole data sets with Mixtral-8x22B on C2.

A data set is so many batches, or parts of one, as its requests fill; `extrapolation` says how far that is from a run of
all passes. Loading the model, which the paper includes, is not simulated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paper_figures.moegen.published import DATASETS, INCONSISTENT, TABLE4_HOURS
from paper_figures.moegen.rows import Row, computed, find
from paper_figures.moegen.settings import LIMITS, SYSTEMS, Case
from paper_figures.moegen.text import pair
from paper_figures.support import markdown_table

NOTE = "Mixtral-8x22B, C2 (A5000, 512 GB), synthetic prompts of the published lengths; published: MoE-Gen Table 4"
MODEL, SETTING = "mixtral-8x22b", "C2"
PREFILLED = 1024  # requests of a data set with one token each, of which all passes are simulated


def cases(systems: Sequence[str] = tuple(SYSTEMS)) -> list[Case]:
    return [_case(system, dataset) for dataset in DATASETS for system in systems]


def _case(system: str, dataset: str) -> Case:
    _, prompt, g = DATASETS[dataset]
    return Case(
        system=system, setting=SETTING, model=MODEL, prompt=prompt, g=g, num_requests=PREFILLED if g == 1 else None
    )


def compute(chosen: Sequence[Case] | None = None) -> dict[str, Any]:
    return {"label": "simulated", "rows": list(computed(cases() if chosen is None else chosen))}


def hours(rows: Sequence[Row], system: str, dataset: str) -> float | None:
    """Return the hours of a data set, or null where its batch was not simulated."""
    found = find(rows, _case(system, dataset))
    return found and DATASETS[dataset][0] / found["sequences"] * (found["prefill_s"] + found["decode_s"]) / 3600


def tables(data: dict[str, Any]) -> str:
    rows = data["rows"]
    columns: dict[str, Any] = {"system": str}
    for dataset, (number, prompt, g) in DATASETS.items():
        columns[f"{dataset}, {number:,} ({prompt}, {g})"] = lambda system, dataset=dataset: pair(
            TABLE4_HOURS.get(system, {}).get(dataset), hours(rows, system, dataset)
        )
    return (
        "# Hours for whole data sets: published / here (simulated batches, extrapolated)\n\n"
        f"{markdown_table(columns, [s for s in SYSTEMS if any(r['system'] == s for r in rows)])}\n"
        f"{INCONSISTENT['lightning']}\n\n{LIMITS}"
    )
