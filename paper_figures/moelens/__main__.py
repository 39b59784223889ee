"""Draw MoE-Lens's figures: `python -m paper_figures.moelens [NAME ...] [--out FOLDER]`.

Without a name, what is committed and what takes no run is drawn to results/figures/moelens.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from harness.interrupts import exit_code
from paper_figures import reports
from paper_figures.drawing import make
from paper_figures.moelens import fig1, simulated, table1, table2, utilization
from paper_figures.reports import Report
from paper_figures.support import REFERENCE

FOLDER = REFERENCE / "moelightning-simulated"  # it is MoE-Lightning that Table 1 and Fig. 1 are about
REPORTS = {
    "table1": Report(compute=table1.compute, tables=table1.tables, note=table1.NOTE, folder=FOLDER),
    "fig1": Report(
        compute=fig1.compute, tables=fig1.tables, pictures={"fig1-busy": fig1.draw}, note=fig1.NOTE, folder=FOLDER
    ),
}


def others(folder: Path) -> None:
    """Draw what is computed at once or has recorded runs of its own."""
    Console(width=110).print(table2.table(table2.rows()))
    make(
        folder, "utilization", utilization.compute(),
        {"fig3-stage1": utilization.draw_fig3, "fig4-stage2": utilization.draw_fig4}, note=utilization.NOTE,
    )  # fmt: skip
    make(
        folder, "simulated", simulated.compute(),
        {"fig11-throughput": simulated.draw_fig11, "fig13-execution": simulated.draw_fig13}, note=simulated.NOTE,
    )  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    return reports.main("moelens", REPORTS, others, arguments)


if __name__ == "__main__":
    sys.exit(exit_code(main))
