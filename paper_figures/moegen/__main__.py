"""Make MoE-Gen's reports: `python -m paper_figures.moegen [NAME ...] [--out FOLDER]`.

Without a name, what is committed is drawn again to results/figures/moegen.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from harness.interrupts import exit_code
from paper_figures import reports
from paper_figures.moegen import (
    accuracy,
    claims,
    datasets,
    emulated,
    extrapolation,
    long_contexts,
    omega,
    regret,
    small_batches,
    throughput,
    traffic,
    unlimited,
)
from paper_figures.moegen.rows import FOLDER
from paper_figures.reports import Report

REPORTS = {
    "small_batches": Report(
        compute=small_batches.compute, tables=small_batches.tables, note=small_batches.NOTE, folder=FOLDER
    ),
    "omega": Report(
        compute=omega.compute, tables=omega.tables, pictures={"fig7-omega": omega.draw}, note=omega.NOTE,
        folder=FOLDER,
    ),
    "traffic": Report(
        compute=traffic.compute, tables=traffic.tables, pictures={"fig4-traffic": traffic.draw}, note=traffic.NOTE,
        folder=FOLDER,
    ),
    "long_contexts": Report(
        compute=long_contexts.compute, tables=long_contexts.tables, note=long_contexts.NOTE, folder=FOLDER
    ),
    "throughput": Report(
        compute=throughput.compute, tables=throughput.tables, pictures={"systems": throughput.draw},
        note=throughput.NOTE, folder=FOLDER,
    ),
    "datasets": Report(compute=datasets.compute, tables=datasets.tables, note=datasets.NOTE, folder=FOLDER),
    "extrapolation": Report(
        compute=extrapolation.compute, tables=extrapolation.tables, note=extrapolation.NOTE, folder=FOLDER
    ),
    "unlimited": Report(compute=unlimited.compute, tables=unlimited.tables, note=unlimited.NOTE, folder=FOLDER),
    "regret": Report(compute=regret.compute, tables=regret.tables, note=regret.NOTE, folder=FOLDER),
    "emulated": Report(
        compute=emulated.compute, tables=emulated.tables, note=emulated.NOTE, folder=emulated.FOLDER
    ),
    "claims": Report(compute=claims.compute, tables=claims.tables, note=claims.NOTE, folder=FOLDER),
    "accuracy": Report(compute=accuracy.compute, tables=accuracy.tables, note=accuracy.NOTE, folder=FOLDER),
}  # fmt: skip


def others(folder: Path) -> None:
    """Draw nothing more: all pictures are those of reports."""


def main(arguments: Sequence[str] | None = None) -> int:
    return reports.main("moegen", REPORTS, others, arguments)


if __name__ == "__main__":
    sys.exit(exit_code(main))
