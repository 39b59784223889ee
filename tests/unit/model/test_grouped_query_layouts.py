"""What the layouts of Qwen3-MoE, OLMoE and Qwen2-MoE read from config.json, under every name; and what they refuse."""

from __future__ import annotations

from dataclasses import replace

import pytest
from transformers import AutoConfig

from harness.config import ConfigError
from harness.model import families
from harness.model.planned import PlannedLayout
from tests.unit.model.published import PUBLISHED

QWEN3, OLMOE, QWEN2 = (PUBLISHED[name].config for name in ("qwen3-30b-a3b", "olmoe-1b-7b", "qwen2-57b-a14b"))


def read(entries):
    return families.layout(entries["model_type"]).spec_from_config(entries, "m", "bfloat16")


def as_transformers_writes(entries):
    return AutoConfig.for_model(**entries).to_dict()


def test_a_bias_of_the_output_projection_lies_behind_attention():
    spec = read(QWEN3 | {"attention_bias": True})
    assert spec.qkv_bias and spec.o_bias
    own, planned = (layout.layer_parts(spec, 0) for layout in (families.layout(spec.family), PlannedLayout))
    assert [part.nbytes for part in own] == [part.nbytes for part in planned]


@pytest.mark.parametrize("entries", [QWEN3, OLMOE, QWEN2], ids=lambda entries: entries["model_type"])
def test_entries_that_are_left_out_have_the_defaults_of_transformers(entries):
    needed = {"model_type", "hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers"}
    needed |= {"shared_expert_intermediate_size", "num_attention_heads", "num_experts", "num_experts_per_tok"}
    needed |= {"vocab_size", "max_position_embeddings"}
    least = {key: value for key, value in entries.items() if key in needed} | {"num_attention_heads": 16}
    spec, whole = read(least), read(as_transformers_writes(least))
    assert replace(spec, eos_token_id=None) == replace(whole, eos_token_id=None)
    assert not spec.router.renormalise


def test_layers_without_experts():
    assert read(QWEN3 | {"mlp_only_layers": [0, 5]}).dense_layers == (0, 5)
    every_second = read(QWEN2 | {"decoder_sparse_step": 2, "mlp_only_layers": [1]})
    assert every_second.moe_layers == tuple(range(3, 28, 2))
    assert every_second.dense_dim == QWEN2["intermediate_size"]
    assert read(QWEN3).dense_layers == () and read(QWEN3).dense_dim == 0


def test_windows():
    assert read(QWEN3 | {"sliding_window": 512}).sliding_window is None
    assert read(QWEN3 | {"sliding_window": 512, "use_sliding_window": True}).sliding_window == 512
    for layers in ({}, {"layer_types": ["sliding_attention", "full_attention"] * 14}):
        slides = read(QWEN2 | {"sliding_window": 512, "use_sliding_window": True} | layers)
        kinds = as_transformers_writes(QWEN2 | {"sliding_window": 512, "use_sliding_window": True} | layers)
        assert [slides.window(layer) for layer in range(28)] == [512, None] * 14
        assert kinds["layer_types"] == ["sliding_attention", "full_attention"] * 14
    all_slide = {"sliding_window": 512, "use_sliding_window": True, "layer_types": ["sliding_attention"] * 28}
    assert {read(QWEN2 | all_slide).window(layer) for layer in range(28)} == {512}


@pytest.mark.parametrize("entries", [QWEN3, OLMOE], ids=lambda entries: entries["model_type"])
def test_the_number_of_experts_has_two_names(entries):
    other = {key: value for key, value in entries.items() if key != "num_experts"} | {"num_local_experts": 32}
    assert read(other).num_experts == 32
    assert read(other | {"num_experts": 32}) == read(other)
    with pytest.raises(ConfigError, match=r"num_experts: must agree with num_local_experts 32, got 16"):
        read(other | {"num_experts": 16})


@pytest.mark.parametrize(
    ("entries", "changes", "told"),
    [
        (QWEN3, {"mlp_only_layers": [48]}, "mlp_only_layers: must be a list of integers from 0 to 47, got [48]"),
        (QWEN3, {"mlp_only_layers": 3}, "mlp_only_layers: must be a list of integers"),
        (QWEN3, {"mlp_only_layers": list(range(48))}, "mlp_only_layers: must leave a layer with experts"),
        (QWEN3, {"decoder_sparse_step": 49}, "decoder_sparse_step: must leave a layer with experts"),
        (QWEN3, {"decoder_sparse_step": 0}, "decoder_sparse_step: must be a positive integer"),
        (QWEN3, {"mlp_only_layers": [0], "intermediate_size": None}, "intermediate_size: missing"),
        (QWEN3, {"norm_topk_prob": 1}, "norm_topk_prob: must be true or false"),
        (QWEN3, {"attention_bias": "yes"}, "attention_bias: must be true or false"),
        (QWEN3, {"use_sliding_window": True, "sliding_window": 0}, "sliding_window: must be a positive integer, got 0"),
        (QWEN3, {"moe_intermediate_size": None}, "moe_intermediate_size: missing"),
        (QWEN3, {"num_experts": 4}, "num_experts_per_tok: must be at most num_experts 4, got 8"),
        (QWEN3, {"hidden_act": "gelu"}, "hidden_act: must be 'silu'"),
        (OLMOE, {"clip_qkv": 0}, "clip_qkv: must be a positive number, got 0"),
        (OLMOE, {"head_dim": 64}, "head_dim: must be hidden_size 2048 / 16 heads, got 64"),
        (OLMOE, {"sliding_window": 128}, "sliding_window: must be None, got 128"),
        (QWEN2, {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size: must be a positive integer"),
        (QWEN2, {"use_sliding_window": True, "max_window_layers": 21}, "max_window_layers: must give a window to all"),
        (QWEN2, {"use_sliding_window": True, "sliding_window": None}, "sliding_window: must be a positive integer"),
        (QWEN2, {"layer_types": ["sliding_attention"] * 28}, "layer_types: must be all 'full_attention' without"),
        (QWEN2, {"layer_types": ["full_attention"]}, "layer_types: must be 28 times"),
        (QWEN2, {"layer_types": ["chunked_attention"] * 28}, "layer_types: must be 28 times"),
    ],
)
def test_what_cannot_run_is_refused_by_name(entries, changes, told):
    with pytest.raises(ConfigError) as raised:
        read(entries | changes)
    assert raised.value.field == "model.path" and f"config.json: {told}" in raised.value.message
    assert "\n" not in str(raised.value)


def test_where_a_window_begins_with_another_layer_it_is_refused():
    kinds = ["full_attention", "sliding_attention"] * 14
    with pytest.raises(ConfigError, match="layer_types: must give a window to all layers, or to every second one"):
        read(QWEN2 | {"use_sliding_window": True, "layer_types": kinds})
