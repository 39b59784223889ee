"""The YAML shows every setting with its default; mistakes are answered with the field."""

from __future__ import annotations

import json

import numpy as np
import pytest
import yaml

from harness.config import ConfigError
from harness.routing.build import available, build_routing, parse_routing
from harness.study.fits import likeness, synthetic
from tests.composing import CONF, names_in
from tests.conftest import ROOT
from tests.unit.routing.models import MODEL
from tests.unit.study.texts import random_text

FITTED = ["trained_deepseek", "trained_mixtral"]


def test_every_kind_has_a_yaml():
    assert available() == ["correlated", "skewed", "trace", "uniform"]
    assert names_in("routing") == sorted([*available(), *FITTED])


@pytest.mark.parametrize("name", FITTED)
def test_fitted_settings_are_those_of_the_committed_study(name):
    """And the routing that they give has the loads, the kept and the followed shares that the study reports."""
    values = yaml.safe_load((CONF / "routing" / f"{name}.yaml").read_text(encoding="utf-8"))
    study = json.loads((ROOT / f"results/reference/routing/{name.removeprefix('trained_')}.json").read_text())
    assert study["fit"]["settings"].items() <= values.items() and values["name"] == "correlated"
    assert values.keys() == yaml.safe_load((CONF / "routing/correlated.yaml").read_text(encoding="utf-8")).keys()
    form, reported = study["model"], study["fit"]["routings"]
    like = random_text(0, lengths=(500,) * 8, layers=form["layers"], num_experts=form["experts"], k=form["k"])
    drawn = synthetic(like, values, seed=1)
    halves = (drawn.requests(np.arange(first, 8, 2)) for first in (0, 1))
    found = likeness(*halves)
    for measure in ("entropy_bits", "kept", "followed"):
        assert found[measure] == pytest.approx(reported["correlated"][measure], abs=0.05)
        assert found[measure] == pytest.approx(reported["recorded"][measure], abs=0.1)


@pytest.mark.parametrize("name", available())
def test_yaml_and_code_have_the_same_defaults(name):
    values = yaml.safe_load((CONF / "routing" / f"{name}.yaml").read_text(encoding="utf-8"))
    module, parsed = parse_routing(values)
    assert parsed == module.Config()


@pytest.mark.parametrize(
    ("values", "field", "told"),
    [
        ({}, "routing.name", "valid are correlated, skewed, trace, uniform"),
        ({"name": "even"}, "routing.name", "'even' is no kind"),
        ({"name": "uniform", "skew": 1}, "routing.skew", "unknown key"),
        ({"name": "skewed", "zipf_exponnt": 1.0}, "routing.zipf_exponnt", "did you mean 'zipf_exponent'"),
        ({"name": "skewed", "zipf_exponent": -1.0}, "routing.zipf_exponent", "between 0 and 10"),
        ({"name": "skewed", "model_seed": -1}, "routing.model_seed", ">= 0"),
        ({"name": "correlated", "keep_token": 1.0}, "routing.keep_token", "1 - 1/lookback = 0.984375, got 1"),
        ({"name": "correlated", "keep_token": -0.1}, "routing.keep_token", "between 0 and"),
        ({"name": "correlated", "follow_layer": 1.5}, "routing.follow_layer", "between 0 and 1"),
        ({"name": "correlated", "lookback": 1}, "routing.lookback", "between 2 and 4096"),
        ({"name": "correlated", "zipf_exponent": -1.0}, "routing.zipf_exponent", "between 0 and 10"),
        ({"name": "trace"}, "routing.path", "missing"),
        ({"name": "trace", "path": "nowhere.jsonl"}, "routing.path", "nowhere.jsonl: cannot be read"),
    ],
)
def test_mistakes_name_the_field(values, field, told):
    with pytest.raises(ConfigError) as caught:
        build_routing(values, MODEL, 0)
    assert caught.value.field == field
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)
