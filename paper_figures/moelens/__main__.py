"""MoE-Lens's figures: `python -m paper_figures.moelens [NAME ...] [--out FOLDER]`.

Without a name, what is committed and what takes no run is drawn to results/figures/moelens.
"""

from paper_figures.drawing import make
from paper_figures.moelens import fig1, simulated, table1, table2, utilization
from paper_figures.reports import Report, main
from paper_figures.support import REFERENCE

FOLDER = REFERENCE / "moelightning-simulated"  # it is MoE-Lightning that Table 1 and Fig. 1 are about
REPORTS = {
    "table1": Report(compute=table1.compute, tables=table1.tables, note=table1.NOTE, folder=FOLDER),
    "fig1": Report(
        compute=fig1.compute, tables=fig1.tables, pictures={"fig1-busy": fig1.draw}, note=fig1.NOTE, folder=FOLDER
    ),
}

if __name__ == "__main__" and not main("moelens", REPORTS):
    table2.main()
    make(
        "moelens", "utilization", utilization.compute(),
        {"fig3-stage1": utilization.draw_fig3, "fig4-stage2": utilization.draw_fig4}, note=utilization.NOTE,
    )  # fmt: skip
    make(
        "moelens", "simulated", simulated.compute(),
        {"fig11-throughput": simulated.draw_fig11, "fig13-execution": simulated.draw_fig13}, note=simulated.NOTE,
    )  # fmt: skip
