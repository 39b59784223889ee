"""Pictures and tables of recorded routing: what is drawn is what the studies say, and the committed page is current."""

from __future__ import annotations

import copy

import numpy as np
import pytest

from paper_figures.routing import compared, drawn
from paper_figures.routing.__main__ import PICTURES, columns_in
from paper_figures.support import REFERENCE

FOLDER = REFERENCE / "routing"


@pytest.fixture(scope="module")
def columns() -> list[drawn.Column]:
    return columns_in(FOLDER)


def test_each_trained_model_has_its_untrained_twin(columns):
    assert len(columns) >= 2 and all(column.control is not None for column in columns)
    for column in columns:
        assert column.study["model"] == {**column.control["model"], "model": column.study["model"]["model"]}
        assert column.study["popularity"] != column.control["popularity"]


def test_the_committed_page_is_what_the_studies_say(columns):
    assert (FOLDER / "compared.md").read_text(encoding="utf-8") == compared.page(columns)


def test_numbers_by_layer_are_means_over_domains():
    """A study made by hand has two domains and two layers, of which the first predicts nothing."""
    loads = {"a": [[0.5, 0.3, 0.1, 0.1], [0.25] * 4], "b": [[0.7, 0.1, 0.1, 0.1], [0.25] * 4]}
    bits = {"bits": [1.5], "shuffled_bits": [0.5], "entropy_bits": [2.0]}
    study = {
        "popularity": {name: {"sorted_shares": shares} for name, shares in loads.items()},
        "layers": {name: {"favourites": bits} for name in loads},
        "prediction": {name: {"popularity": {}} for name in loads},
        "domains": {"a": {"favourite_weight": [0.6, 0.8]}, "b": {"favourite_weight": [0.8, 0.8]}},
    }
    assert drawn.hottest_quarter(study).tolist() == pytest.approx([0.6, 0.25])
    assert drawn.informed(study).tolist() == [0.5]
    assert drawn.cosines(study) is None
    assert drawn.favourite_weights(study).tolist() == pytest.approx([0.7, 0.8])
    without = copy.deepcopy(study)
    without["domains"]["b"]["favourite_weight"] = None
    assert drawn.favourite_weights(without) is None


@pytest.mark.needs("matplotlib", extra="figures")
def test_lines_have_the_studies_numbers(columns):
    """Each model's column has its own numbers; an untrained twin never passes for the model."""
    named = [line for axes in drawn.prediction(columns).axes for line in axes.lines]
    busiest = [line for axes in drawn.popularity(columns).axes for line in axes.lines]
    for column in columns:
        k, first = column.study["model"]["k"], column.study["model"]["first_layer"]
        domains = column.study["prediction"].values()
        expected = np.mean([d["next_gate"]["true_that_are_predicted"] for d in domains], axis=0)[:, k - 1]
        assert any(
            line.get_label() == "next layer's router" and np.array_equal(line.get_ydata(), expected) for line in named
        )
        for name, found in column.study["popularity"].items():
            values = found["busiest_over_mean"]
            (line,) = [
                line for line in busiest
                if line.get_label() == name and list(line.get_ydata()) == values
            ]  # fmt: skip
            assert list(line.get_xdata()) == list(range(first, first + len(values)))


@pytest.mark.needs("matplotlib", extra="figures")
def test_every_picture_has_a_column_for_each_model(columns):
    for draw in PICTURES.values():
        titles = [axes.get_title() for axes in draw(columns).axes]
        assert [sum(column.title in title for title in titles) for column in columns] == [1] * len(columns)
