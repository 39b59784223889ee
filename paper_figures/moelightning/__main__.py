"""Draw MoE-Lightning's figures: `python -m paper_figures.moelightning [NAME ...] [--out FOLDER]`.

Without a name, what is committed and what takes no run is drawn to results/figures/moelightning.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from harness.interrupts import exit_code
from paper_figures import reports
from paper_figures.drawing import make
from paper_figures.moelightning import fig6, fig10, hrm_accuracy, hrm_plots, several_gpus, systems, table4, table5
from paper_figures.reports import Report
from paper_figures.support import REFERENCE

SIMULATED, EMULATED = REFERENCE / "moelightning-simulated", REFERENCE / "moelightning-emulated"
REPORTS = {
    "fig6": Report(
        compute=fig6.compute, tables=fig6.tables, pictures={"fig6-timelines": fig6.draw}, note=fig6.NOTE,
        folder=EMULATED,
    ),
    "fig10": Report(
        compute=fig10.compute, tables=fig10.tables, pictures={"fig10-policies": fig10.draw}, note=fig10.NOTE,
        folder=SIMULATED,
    ),
    "systems": Report(
        compute=systems.compute, tables=systems.tables, pictures={"fig7-systems": systems.draw}, note=systems.NOTE,
        folder=SIMULATED,
    ),
    "table4": Report(compute=table4.compute, tables=table4.tables, note=table4.NOTE, folder=SIMULATED),
    "table5": Report(compute=table5.compute, tables=table5.tables, note=table5.NOTE, folder=SIMULATED),
    "hrm_accuracy": Report(
        compute=hrm_accuracy.compute, tables=hrm_accuracy.tables, pictures={"hrm-accuracy": hrm_accuracy.draw},
        note=hrm_accuracy.NOTE, folder=SIMULATED,
    ),
    "several_gpus": Report(
        compute=several_gpus.compute, tables=several_gpus.tables,
        pictures={"fig7-fig8-several-gpus": several_gpus.draw}, note=several_gpus.NOTE, folder=SIMULATED,
    ),
}  # fmt: skip


def others(folder: Path) -> None:
    """Draw what is computed at once."""
    make(
        folder, "hrm", hrm_plots.compute(),
        {"fig4-attention": hrm_plots.draw_fig4, "fig5-experts": hrm_plots.draw_fig5}, note=hrm_plots.NOTE,
    )  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    return reports.main("moelightning", REPORTS, others, arguments)


if __name__ == "__main__":
    sys.exit(exit_code(main))
