"""Compute some rows of a simulated report again, and keep its others: `python -m paper_figures.moegen.part NAME ...`.

    python -m paper_figures.moegen.part throughput --system "MoE-Gen(H)" --model mixtral-8x7b

Rows do not depend on each other; each says which commit has computed it.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness.cli.arguments import CommandParser
from harness.interrupts import exit_code
from harness.model.cache import make_writable
from harness.record.provenance import shown_command
from paper_figures import reports
from paper_figures.moegen import (
    datasets,
    extrapolation,
    long_contexts,
    omega,
    small_batches,
    throughput,
    traffic,
    unlimited,
)
from paper_figures.moegen.__main__ import REPORTS
from paper_figures.moegen.rows import FOLDER, Row, computed, key_of, stored
from paper_figures.moegen.settings import SETTINGS, SYSTEMS, Case
from paper_figures.support import write_json

CASES = {
    "small_batches": small_batches.cases,
    "omega": omega.cases,
    "traffic": traffic.cases,
    "long_contexts": long_contexts.cases,
    "throughput": throughput.cases,
    "datasets": datasets.cases,
    "extrapolation": extrapolation.cases,
    "unlimited": unlimited.cases,
}


def merged(all_cases: Sequence[Case], kept: Sequence[Row], new: Sequence[Row]) -> list[Row]:
    """Return the rows in the order of the cases; a new row takes the place of the kept one of its case."""
    by_key = {key_of(r): r for r in (*kept, *new)}
    return [by_key[case.key] for case in all_cases if case.key in by_key]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = CommandParser("paper_figures.moegen.part", __doc__)
    parser.add_argument("name", choices=list(CASES), help="the report")
    parser.add_argument("--system", nargs="+", choices=list(SYSTEMS), default=list(SYSTEMS))
    parser.add_argument("--setting", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--model", nargs="+", default=None, help="default: all")
    parser.add_argument("--missing", action="store_true", help="only rows that are not there yet")
    parser.add_argument("--out", type=Path, default=FOLDER, metavar="FOLDER")
    return parser.run(_compute, arguments)


def _compute(given: Namespace) -> int:
    make_writable(given.out, "--out")  # before the work
    every, kept = CASES[given.name](), stored(given.name, given.out)
    there = {key_of(r) for r in kept}
    chosen = [
        case
        for case in every
        if case.system in given.system
        and case.setting in given.setting
        and (given.model is None or case.model in given.model)
        and not (given.missing and case.key in there)
    ]

    command = shown_command("-m paper_figures.moegen", [given.name])
    new: list[Row] = []
    for found in computed(chosen):  # what is cut off leaves what was finished
        new.append(found)
        rows = merged(every, kept, new)
        write_json(given.out / f"{given.name}.json", {**reports.made_by(command), "label": "simulated", "rows": rows})

    def compute() -> dict[str, Any]:
        return {"label": "simulated", "rows": merged(every, kept, new)}

    reports.run(given.name, replace(REPORTS[given.name], compute=compute), given.out, command)
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
