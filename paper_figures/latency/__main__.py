"""Make the reports of the systems for small batches: `python -m paper_figures.latency [NAME ...] [--out FOLDER]`.

Without a name, what is committed is drawn again to results/figures/latency.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from harness.interrupts import exit_code
from paper_figures import reports
from paper_figures.latency import caches, systems, where
from paper_figures.reports import Report
from paper_figures.support import REFERENCE

FOLDER = REFERENCE / "latency-simulated"
REPORTS = {
    "systems": Report(
        compute=systems.compute, tables=systems.tables, pictures={"fig12-14-systems": systems.draw},
        note=systems.NOTE, folder=FOLDER,
    ),
    "caches": Report(
        compute=caches.compute, tables=caches.tables, pictures={"caches": caches.draw}, note=caches.NOTE, folder=FOLDER
    ),
    "where": Report(
        compute=where.compute, tables=where.tables, pictures={"where": where.draw}, note=where.NOTE, folder=FOLDER
    ),
}  # fmt: skip


def others(folder: Path) -> None:
    """Draw nothing more: all pictures are those of reports."""


def main(arguments: Sequence[str] | None = None) -> int:
    return reports.main("latency", REPORTS, others, arguments)


if __name__ == "__main__":
    sys.exit(exit_code(main))
