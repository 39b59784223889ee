"""Pictures are drawn from the JSON file beside them, with their label at the foot. Needs the `figures` dependencies."""

from __future__ import annotations

import json

import pytest

from paper_figures import drawing
from paper_figures.moelens import simulated, utilization
from paper_figures.moelightning import hrm_plots

PICTURES = {
    "utilization": (utilization, (utilization.draw_fig3, utilization.draw_fig4)),
    "simulated": (simulated, (simulated.draw_fig11, simulated.draw_fig13)),
    "hrm": (hrm_plots, (hrm_plots.draw_fig4, hrm_plots.draw_fig5)),
}


@pytest.mark.needs("matplotlib", extra="figures")
@pytest.mark.parametrize("name", PICTURES)
def test_every_picture_is_drawn_and_says_what_it_is(name, tmp_path, monkeypatch):
    feet: list[str] = []
    save = drawing.save

    def spying(figure, path, *, label, note):
        save(figure, path, label=label, note=note)
        feet.append(" ".join(figure.get_supxlabel().split()))

    monkeypatch.setattr(drawing, "save", spying)
    module, functions = PICTURES[name]
    draw = {function.__name__: function for function in functions}
    drawing.make(tmp_path / "paper", name, module.compute(), draw, note=module.NOTE)
    label = json.loads((tmp_path / "paper" / f"{name}.json").read_text())["label"]
    assert label == ("simulated" if name == "simulated" else "predicted")
    assert feet == [f"{label} · {module.NOTE}"] * len(functions)
    assert all((tmp_path / "paper" / f"{picture}.png").stat().st_size > 10_000 for picture in draw)
