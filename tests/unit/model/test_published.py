"""What families read from a published config.json is what the model's YAML says, and as large as it is planned."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import fields
from math import prod

import pytest
import yaml
from transformers import AutoConfig

from harness.config import parse
from harness.memory.weights import stored_bytes
from harness.model import families
from harness.model.config import ModelConfig
from harness.model.dimensions import Dimensions
from harness.model.planned import PlannedLayout, PlannedModel
from tests.unit.model.conftest import CONF
from tests.unit.model.published import PUBLISHED

RUNNABLE = sorted(name for name, found in PUBLISHED.items() if found.config["model_type"] in families.available())


def read(entries):
    return families.layout(entries["model_type"]).spec_from_config(entries, "m", "bfloat16")


@pytest.mark.parametrize("name", RUNNABLE)
def test_the_published_config_has_the_dimensions_of_the_yaml(name):
    """Under the hub's names and under those that transformers writes."""
    planned = parse(ModelConfig, yaml.safe_load((CONF / f"{name}.yaml").read_text()), "model").planned_spec()
    published = PUBLISHED[name].config
    given = families.layout(published["model_type"]).reference_entries(read(published), published)
    for entries in (published, AutoConfig.for_model(**deepcopy(given)).to_dict()):
        spec = read(entries)
        for field in fields(Dimensions):
            if field.name != "weights":  # which numbers the files hold is no matter of config.json
                assert getattr(spec, field.name) == getattr(planned, field.name), field.name


@pytest.mark.parametrize("name", RUNNABLE)
def test_parts_are_as_large_as_planned(name):
    """Part by part, to the byte: the sizes of these models are multiples of a cache line. Only what a family keeps in
    float32, such as DeepSeek's routers, is planned in the model's dtype, and sinks, which are a part of their own, in
    attention_in."""
    spec = read(PUBLISHED[name].config)
    family, wide_bytes = families.layout(spec.family), 4 - spec.dtype_bytes
    for layer in (0, spec.num_layers - 1):
        own, planned = (layout.layer_parts(spec, layer) for layout in (family, PlannedLayout))
        more = [sum(prod(t.shape) * wide_bytes for t in part.tensors if t.dtype == "float32") for part in own]
        sizes = [(part.name, part.nbytes - nbytes) for part, nbytes in zip(own, more, strict=True)]
        if spec.attention_sinks:
            sinks = family.attention_part(spec, layer)
            assert sinks is not None and sinks.nbytes == spec.num_heads * 4
            sizes[0] = (sizes[0][0], sizes[0][1] + spec.num_heads * spec.dtype_bytes)
        assert sizes == [(part.name, part.nbytes) for part in planned]
    assert stored_bytes(PlannedModel(spec, family)) == pytest.approx(stored_bytes(PlannedModel(spec)), rel=1e-3)
