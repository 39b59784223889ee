import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from harness.config import ConfigError, parse
from harness.model.config import ModelConfig
from harness.model.recipe import RandomRecipe

TORCH_FREE = (
    "harness.model.config, harness.model.spec, harness.model.layout, harness.model.families, harness.model.zoo, "
    "harness.model.cache, harness.model.families.mixtral_layout, harness.model.hub, harness.verify.records"
)


def test_defaults_are_the_stated_models(model_config):
    mini, tiny = model_config("mixtral-mini"), model_config("mixtral-tiny")
    assert mini.recipe.dtype == "bfloat16" and mini.recipe.weight_std == pytest.approx(mini.recipe.hidden_dim**-0.5)
    assert tiny.recipe.dtype == "float32" and tiny.recipe.weight_std == 0.15
    assert all(getattr(mini.recipe, field.name) is not None or field.default is None for field in fields(RandomRecipe))


def test_the_open_model_needs_a_path(model_config):
    with pytest.raises(ConfigError, match=r"model\.path: missing; give a checkpoint folder or a Hugging Face hub id"):
        model_config("checkpoint")
    assert parse(ModelConfig, {"name": "checkpoint", "path": "/somewhere"}, "model").recipe is None


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"num_layers": 0}, "num_layers: must be at least 1, got 0"),
        ({"num_kv_heads": 3}, "num_kv_heads: must divide num_heads 4"),
        ({"head_dim": 15}, "head_dim: must be even, got 15"),
        ({"experts_per_token": 9}, "experts_per_token: must lie between 1 and num_experts 8, got 9"),
        ({"experts_per_token": 0}, "experts_per_token: must lie between 1 and num_experts 8, got 0"),
        ({"vocab_size": 256}, "vocab_size: must be at least 260, got 256"),
        ({"max_positions": 1}, "max_positions: must be at least 2, got 1"),
        ({"rope_theta": 0.0}, "rope_theta: must be positive, got 0.0"),
        ({"init_std": -1.0}, "init_std: must be positive or null, got -1.0"),
        ({"norm_std": 0.6}, "norm_std: must lie between 0 and 0.5, got 0.6"),
        ({"norm_eps": 0.0}, "norm_eps: must be positive, got 0.0"),
        ({"sliding_window": 0}, "sliding_window: must be at least 1 or null, got 0"),
        ({"family": "llama"}, "family: must be one of .*mixtral.*, got 'llama'"),
        ({"dtype": "int8"}, "dtype: "),
        ({"shared_expert_dim": 64}, "shared_expert_dim: must be 0 for the family mixtral, got 64"),
        ({"qkv_bias": True}, "qkv_bias: must be False for the family mixtral, got True"),
        ({"eos_token_id": 1}, "eos_token_id: must be None for the family mixtral, got 1"),
        (
            {"family": "olmoe", "hidden_dim": 128},
            "family: olmoe cannot have these dimensions .*head_dim: must be",
        ),
        ({"family": "qwen2_moe"}, "family: qwen2_moe cannot have these dimensions .*shared_expert_intermediate_size"),
        ({"family": "qwen3_moe", "qk_norm": "full"}, "qk_norm: must be 'head' for the family qwen3_moe, got 'full'"),
        ({"hidden_dim": "64"}, "hidden_dim: "),
        ({"hiden_dim": 64}, "hiden_dim: "),
    ],
)
def test_impossible_recipes_name_the_field(model_config, change, named):
    with pytest.raises(ConfigError, match=rf"model\.recipe\.{named}"):
        model_config("mixtral-tiny", **change)


def test_every_yaml_of_the_group_is_commented_and_parses():
    paths = sorted((Path(__file__).resolve().parents[3] / "conf" / "model").glob("*.yaml"))
    assert len(paths) >= 3
    for path in paths:
        values = yaml.safe_load(path.read_text())
        assert path.read_text().startswith("#") and values["name"] == path.stem
        parse(ModelConfig, values | {"path": values["path"] or "somewhere"}, "model")


def test_planning_imports_no_torch():
    code = f"import sys, {TORCH_FREE}; sys.exit(int('torch' in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
