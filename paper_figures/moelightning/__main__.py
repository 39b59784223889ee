"""All of MoE-Lightning's figures, into results/figures/moelightning: `python -m paper_figures.moelightning`.

`python -m paper_figures.moelightning several_gpus --out FOLDER` simulates S6 to S9 anew, which takes an hour.
"""

import sys

from paper_figures.drawing import make
from paper_figures.moelightning import hrm_plots, several_gpus
from paper_figures.support import read_json

if sys.argv[1:2] == ["several_gpus"]:
    several_gpus.main(sys.argv[2:])
else:
    make(
        "moelightning", "hrm", hrm_plots.compute(),
        {"fig4-attention": hrm_plots.draw_fig4, "fig5-experts": hrm_plots.draw_fig5}, note=hrm_plots.NOTE,
    )  # fmt: skip
    if (numbers := several_gpus.OUT / "several_gpus.json").exists():
        made = {"fig7-fig8-several-gpus": several_gpus.draw}
        make("moelightning", "several_gpus", read_json(numbers), made, note=several_gpus.NOTE)
