"""Extrapolate MoE-Gen's Table 4 from simulated batches: hours for whole data sets with Mixtral-8x22B on C2.

A data set is so many batches, or parts of one, as its requests fill. How wrong that is, is told for the one run of
which all passes of two and a half batches are simulated. Loading the model, which the paper includes, is not simulated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paper_figures.moegen.published import DATASETS, INCONSISTENT, TABLE4_HOURS
from paper_figures.moegen.rows import Row, computed, find
from paper_figures.moegen.settings import SYSTEMS, Case, most_sequences, spec_of
from paper_figures.moegen.text import pair
from paper_figures.support import markdown_table

NOTE = "Mixtral-8x22B, C2 (A5000, 512 GB), synthetic prompts of the published lengths; published: MoE-Gen Table 4"
MODEL, SETTING = "mixtral-8x22b", "C2"
PREFILLED = 1024  # requests of a data set with one token each, of which all passes are simulated
CHECKED, CHECKED_G, CHECKED_BATCHES = "MoE-Gen(H)", 32, 2.5
ALL_PASSES = "all passes"


def cases(systems: Sequence[str] = tuple(SYSTEMS)) -> list[Case]:
    found = [_case(system, dataset) for dataset in DATASETS for system in systems]
    return [*found, *checked_cases()]


def _case(system: str, dataset: str) -> Case:
    _, prompt, g = DATASETS[dataset]
    return Case(
        system=system, setting=SETTING, model=MODEL, prompt=prompt, g=g, num_requests=PREFILLED if g == 1 else None
    )


def checked_cases(system: str = CHECKED) -> tuple[Case, Case]:
    """Return a batch of which some steps are simulated, and a run of which all passes are."""
    _, prompt, _ = DATASETS["GSM8K"]
    fields = {"system": system, "setting": SETTING, "model": MODEL, "prompt": prompt, "g": CHECKED_G}
    num_requests = round(CHECKED_BATCHES * most_sequences(SETTING, spec_of(MODEL), prompt, CHECKED_G))
    return Case(**fields), Case(**fields, num_requests=num_requests, variant=ALL_PASSES, whole=True)


def compute(chosen: Sequence[Case] | None = None) -> dict[str, Any]:
    return {"label": "simulated", "rows": computed(cases() if chosen is None else chosen)}


def hours(rows: Sequence[Row], system: str, dataset: str) -> float | None:
    """Return the hours of a data set, or null where its batch was not simulated."""
    found = find(rows, _case(system, dataset))
    return found and _hours(found, DATASETS[dataset][0])


def _hours(row: Row, num_requests: int) -> float:
    return num_requests / row["sequences"] * (row["prefill_s"] + row["decode_s"]) / 3600


def error(rows: Sequence[Row]) -> float | None:
    """Return by how much the extrapolation of a batch differs from a run that is simulated to its end.

    It is null where one of them is missing.
    """
    batch, run = (find(rows, case) for case in checked_cases())
    return _hours(batch, run["sequences"]) / _hours(run, run["sequences"]) - 1 if batch and run else None


def tables(data: dict[str, Any]) -> str:
    rows = data["rows"]
    columns: dict[str, Any] = {"system": str}
    for dataset, (number, prompt, g) in DATASETS.items():
        columns[f"{dataset}, {number:,} ({prompt}, {g})"] = lambda system, dataset=dataset: pair(
            TABLE4_HOURS.get(system, {}).get(dataset), hours(rows, system, dataset)
        )
    wrong = error(rows)
    told = "not computed" if wrong is None else f"{wrong:+.1%}"
    return (
        "# Hours for whole data sets: published / here (simulated batches, extrapolated)\n\n"
        f"{markdown_table(columns, [s for s in SYSTEMS if any(r['system'] == s for r in rows)])}\n"
        f"Error of the extrapolation against a run of {CHECKED_BATCHES:g} batches of {CHECKED} with {CHECKED_G} tokens "
        f"to decode, simulated to its end: {told}. {INCONSISTENT['lightning']}\n"
    )
