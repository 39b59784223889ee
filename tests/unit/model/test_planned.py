"""Models without weights: their parts add up to the model, and agree with the layouts of families that have weights."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import yaml

from harness.config import ConfigError
from harness.engine.ops.experts import Experts
from harness.memory.placed import PlacedPart
from harness.memory.weights import stored_bytes
from harness.model import families
from harness.model.planned import PlannedLayout, PlannedModel, planned_model
from harness.settings import parse_settings
from tests.composing import CONF, composed, names_in


def config(name: str):
    return parse_settings(composed(f"model={name}", "machine=simulated")).model


MODELS = [n for n in names_in("model") if yaml.safe_load((CONF / f"model/{n}.yaml").read_text()).get("spec")]


@pytest.mark.parametrize("name", MODELS)
def test_the_parts_are_the_model(name):
    model = planned_model(config(name))
    spec = model.spec
    twice = spec.num_layers * spec.value_up_bytes  # lies in front of attention and behind it
    assert stored_bytes(model) == pytest.approx(spec.model_bytes + twice, rel=1e-6)
    moe = model.family.layer_parts(spec, spec.num_layers - 1)
    assert [part.name for part in moe[:2]] == ["attention_in", "attention_out"]
    assert len(moe) == 2 + spec.num_experts
    assert sum(part.nbytes for part in moe) == pytest.approx(spec.layer_bytes, abs=2)
    for layer in spec.dense_layers:
        assert len(model.family.layer_parts(spec, layer)) == 2
    flops = 2 * (spec.attention_in_params + spec.attention_out_params + spec.common_mlp_params(spec.num_layers - 1))
    assert flops + 2 * spec.experts_per_token * spec.expert_params == spec.flops_per_token_layer


def test_a_recipe_has_the_layout_of_its_checkpoint():
    model = planned_model(config("mixtral-mini"))
    assert model.family is families.layout("mixtral")
    planned = PlannedModel(model.spec, PlannedLayout)
    assert stored_bytes(model) == pytest.approx(stored_bytes(planned), rel=1e-3)  # but for alignment


@pytest.mark.parametrize("model", ["mixtral-8x7b", "mixtral-mini", "checkpoint"])
@pytest.mark.parametrize("path", ["nowhere/at/all", "some/hub-id"])
def test_a_path_that_leads_nowhere_is_an_error(model, path):
    """It is not passed over for the dimensions that the configuration has besides."""
    with pytest.raises(ConfigError, match=rf"model.path: {path}: no such folder"):
        planned_model(parse_settings(composed(f"model={model}", f"model.path={path}")).model)


@pytest.mark.parametrize("model", ["mixtral-8x7b", "mixtral-mini", "checkpoint"])
def test_a_checkpoint_comes_before_other_dimensions(model, tiny):
    planned = planned_model(parse_settings(composed(f"model={model}", f"model.path={tiny.folder}")).model)
    assert replace(planned.spec, name="") == replace(tiny.spec, name="")
    assert planned.family is families.layout("mixtral")


def test_a_checkpoint_of_another_family_needs_dimensions(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "unheard_of"}')
    r1 = planned_model(parse_settings(composed("model=deepseek-r1", f"model.path={tmp_path}")).model)
    assert r1.spec == planned_model(config("deepseek-r1")).spec
    with pytest.raises(ConfigError, match=r"model.path: config.json: model_type"):
        planned_model(parse_settings(composed("model=checkpoint", f"model.path={tmp_path}")).model)


@pytest.mark.parametrize(("tokens", "reached"), [(1, 8.0), (4, 30.53), (10_000, 256.0)])
def test_few_tokens_read_few_experts(tokens, reached):
    """Expected number of 256 experts that `tokens` tokens reach, 8 each: 256 (1 - (31/32)^tokens)."""
    spec = planned_model(config("deepseek-r1")).spec
    layer = spec.num_layers - 1
    parts = tuple(PlacedPart(part, None, ()) for part in PlannedLayout.layer_parts(spec, layer)[2:])
    batch = SimpleNamespace(num_tokens=tokens, index=0, works={})
    acts = SimpleNamespace(max_tokens=tokens, normed=0, expert_ids=1, expert_weights=2, moe_out=3)
    work = Experts(None, spec, batch, acts, parts, tuple(range(256)), layer).work()
    moved = tokens * 8 * (2 * spec.hidden_dim + 3 * spec.expert_dim) * spec.dtype_bytes
    assert (work.device_bytes - moved) / parts[0].layout.nbytes == pytest.approx(reached, abs=0.05)
