"""The committed page of predictions is that of the committed numbers, and says what was learned from and tested on."""

from __future__ import annotations

import pytest

from harness.routing.predictors import StatedRates
from paper_figures.prescope.prediction import FOLDER, RATES_END, by_layer, main, page
from paper_figures.routing.published import FORMS, TABLE3, TABLE3_COST
from paper_figures.support import read_json
from tests.unit.routing.models import Model

PATHS = [path for path in sorted(FOLDER.glob("*.json")) if not path.name.endswith(RATES_END)]


def test_the_page_is_that_of_the_numbers():
    assert {path.stem for path in PATHS} >= {"deepseek", "mixtral"}
    found = {path.stem: read_json(path) for path in PATHS}
    assert (FOLDER / "prediction.md").read_text(encoding="utf-8") == page(found)
    assert TABLE3.keys() == TABLE3_COST.keys() == FORMS.keys()


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_numbers_are_labelled_and_tested_on_other_text(path):
    found = read_json(path)
    assert found["label"] == "recorded" and found["weights"] and found["source"].startswith("learned from ")
    tests = {each["name"] for each in found["texts"]["tests"]}
    assert tests and not any(name in found["texts"]["fit"]["name"] for name in tests)
    assert "/" not in found["command"].replace("harness/", ""), "no folder of a machine"


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_a_simulation_can_state_the_committed_rates(path):
    model = read_json(path)["model"]
    first = model["layers"][0]
    form = Model(len(model["layers"]) + first, model["experts"], model["k"], num_dense_layers=first)
    stated = StatedRates.read(path.with_name(path.stem + RATES_END), form)
    assert len(stated.rates) == len(model["layers"]) - 1 and stated.source.startswith("measured: LLaPor on ")


def test_a_folder_without_predictors_is_told_in_one_line(tmp_path, capsys):
    assert main([str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert "has no predictors.json; python -m harness.llapor writes it" in capsys.readouterr().err


@pytest.mark.needs("matplotlib", extra="figures")
def test_a_way_of_predicting_has_one_colour_in_all_panels():
    """Models that lack a way show the others as every model does."""
    colours: dict[str, set[str]] = {}
    for axes in by_layer({path.stem: read_json(path) for path in PATHS}).get_axes():
        for line in axes.get_lines():
            colours.setdefault(line.get_label(), set()).add(line.get_color())
    assert set(map(len, colours.values())) == {1} and len(set.union(*colours.values())) == len(colours)
