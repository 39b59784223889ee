"""The YAML shows every setting with its default; mistakes are answered with the field."""

from __future__ import annotations

import pytest
import yaml

from harness.config import ConfigError
from harness.routing.build import available, build_routing, parse_routing
from tests.composing import CONF, names_in
from tests.unit.routing.models import MODEL


def test_every_kind_has_a_yaml():
    assert names_in("routing") == available() == ["correlated", "skewed", "trace", "uniform"]


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
