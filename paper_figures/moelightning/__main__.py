"""All of MoE-Lightning's figures, into results/figures/moelightning: `python -m paper_figures.moelightning`."""

from paper_figures.drawing import make
from paper_figures.moelightning import hrm_plots

make(
    "moelightning", "hrm", hrm_plots.compute(),
    {"fig4-attention": hrm_plots.draw_fig4, "fig5-experts": hrm_plots.draw_fig5}, note=hrm_plots.NOTE,
)  # fmt: skip
