"""Compute some rows of a report again, and keep its others: `python -m paper_figures.latency.part NAME ...`.

    python -m paper_figures.latency.part systems --model mixtral-8x7b --gpu A100 --batch 4 64 --missing

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
from harness.cli.overrides import made_folder
from harness.config import ConfigError
from harness.interrupts import exit_code
from harness.record.provenance import shown_command
from paper_figures import reports
from paper_figures.latency import systems, where
from paper_figures.latency.__main__ import FOLDER, REPORTS
from paper_figures.latency.grid import BATCHES, GPUS, MODELS, SYSTEMS, Case, Row, computed
from paper_figures.support import read_json, write_json

CASES = {"systems": systems.cases, "where": where.cases}
_FIELDS = ("system", "model", "gpu", "batch", "variant")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = CommandParser("paper_figures.latency.part", __doc__)
    parser.add_argument("name", choices=list(CASES), help="the report")
    parser.add_argument("--system", nargs="+", choices=list(SYSTEMS), default=list(SYSTEMS))
    parser.add_argument("--model", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--gpu", nargs="+", choices=list(GPUS), default=list(GPUS))
    parser.add_argument("--batch", nargs="+", type=int, choices=BATCHES, default=list(BATCHES))
    parser.add_argument("--missing", action="store_true", help="only rows that are not there yet")
    parser.add_argument("--out", type=Path, default=FOLDER, metavar="FOLDER")
    return parser.run(_compute, arguments)


def _compute(given: Namespace) -> int:
    path = made_folder("--out", str(given.out)) / f"{given.name}.json"
    kept: list[Row] = list(read_json(path)["rows"]) if path.exists() else []
    by_key = {tuple(r[name] for name in _FIELDS): r for r in kept}
    every = CASES[given.name]()
    command = shown_command("-m paper_figures.latency", [given.name])

    def rows() -> list[Row]:
        return [by_key[case.key] for case in every if case.key in by_key]

    def is_asked(case: Case) -> bool:
        named = case.system in given.system and case.model in given.model and case.gpu in given.gpu
        return named and case.batch in given.batch and not (given.missing and case.key in by_key)

    asked = [case for case in every if is_asked(case)]
    if not (asked or by_key):
        raise ConfigError("--batch", f"{given.name} has no row with these systems, models, GPUs and batches")
    for case, found in zip(asked, computed(asked), strict=True):
        by_key[case.key] = found
        write_json(path, {**reports.made_by(command), "label": "simulated", "rows": rows()})

    def compute() -> dict[str, Any]:
        return {"label": "simulated", "rows": rows()}

    reports.run(given.name, replace(REPORTS[given.name], compute=compute), given.out, command)
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
