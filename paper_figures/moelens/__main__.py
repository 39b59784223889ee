"""All of MoE-Lens's figures, into results/figures/moelens: `python -m paper_figures.moelens`."""

from paper_figures.drawing import make
from paper_figures.moelens import simulated, table2, utilization

table2.main()
make(
    "moelens", "utilization", utilization.compute(),
    {"fig3-stage1": utilization.draw_fig3, "fig4-stage2": utilization.draw_fig4}, note=utilization.NOTE,
)  # fmt: skip
make(
    "moelens", "simulated", simulated.compute(),
    {"fig11-throughput": simulated.draw_fig11, "fig13-execution": simulated.draw_fig13}, note=simulated.NOTE,
)  # fmt: skip
