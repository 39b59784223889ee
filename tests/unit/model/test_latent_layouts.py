"""What DeepSeek's layouts read from config.json, under every name, and what they refuse."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest
import torch
from transformers import AutoConfig

from harness.config import ConfigError
from harness.model import families
from harness.model.layout import RowsOfEach, TensorSlice
from tests.unit.model.published import PUBLISHED

V2, LITE, V3, MOONLIGHT = (
    PUBLISHED[name].config for name in ("deepseek-v2", "deepseek-v2-lite", "deepseek-v3", "moonlight-16b-a3b")
)


def read(entries):
    return families.layout(entries["model_type"]).spec_from_config(entries, "m", "bfloat16")


def test_the_cache_holds_what_the_paper_says():
    """DeepSeek-V2 §2.1.4 and its table 1: 4.5 head dimensions a token and layer, of 128 numbers each."""
    for entries in (V2, LITE, V3, MOONLIGHT):
        assert read(entries).kv_bytes_per_token_layer == 4.5 * 128 * 2
        assert read(entries).expands_prefill


@pytest.mark.parametrize(("entries", "other"), [(V2, "num_experts"), (V3, "num_local_experts")])
def test_the_number_of_experts_has_two_names(entries, other):
    renamed = {key: value for key, value in entries.items() if key != "n_routed_experts"} | {other: 32}
    assert read(renamed).num_experts == 32 == AutoConfig.for_model(**renamed).n_routed_experts
    with pytest.raises(ConfigError, match=rf"n_routed_experts: must agree with {other} 32, got 16"):
        read(renamed | {"n_routed_experts": 16})


@pytest.mark.parametrize("entries", [V2, V3], ids=lambda entries: entries["model_type"])
def test_entries_that_are_left_out_have_the_defaults_of_transformers(entries):
    needed = {"model_type", "hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers"}
    needed |= {"num_attention_heads", "n_routed_experts", "num_experts_per_tok", "n_shared_experts", "vocab_size"}
    needed |= {"max_position_embeddings", "num_key_value_heads"}
    least = {key: value for key, value in entries.items() if key in needed}
    whole = AutoConfig.for_model(**least).to_dict()
    assert replace(read(least), eos_token_id=None) == replace(read(whole), eos_token_id=None)


REFUSED = {
    "norms of weights that transformers leaves out": (V2, {"norm_topk_prob": True}, "norm_topk_prob: must be False"),
    "another score": (V2, {"scoring_func": "sigmoid"}, "scoring_func: must be 'softmax'"),
    "another score of V3": (V3, {"scoring_func": "softmax"}, "scoring_func: must be 'sigmoid'"),
    "another choice": (V2, {"topk_method": "noaux_tc"}, "topk_method: must be 'greedy' or 'group_limited_greedy'"),
    "another choice of V3": (V3, {"topk_method": "greedy"}, "topk_method: must be 'noaux_tc'"),
    "groups of unequal size": (V3, {"n_group": 7}, "n_group: must divide 256 experts"),
    "groups too small to score": (V3, {"n_group": 256}, "n_group: must divide 256 experts into groups of 2 or more"),
    "groups of one expert": (V2, {"n_group": 160}, "n_group: must divide 160 experts into groups of 2 or more"),
    "groups with too few experts": (
        V3,
        {"n_group": 128, "topk_group": 3},
        "topk_group: must be at most n_group 128, with 8 experts or more, got 3",
    ),
    "experts in some layers": (V2, {"moe_layer_freq": 2}, "moe_layer_freq: must be 1"),
    "no layer with experts": (V3, {"first_k_dense_replace": 61}, "first_k_dense_replace: must be below"),
    "keys of fewer heads": (V3, {"num_key_value_heads": 8}, "num_key_value_heads: must be 128"),
    "biases": (V3, {"attention_bias": True}, "attention_bias: must be False"),
    "biases of MLPs": (V2, {"mlp_bias": True}, "mlp_bias: must be False"),
    "pairs that lie apart": (V3, {"rope_interleave": False}, "rope_interleave: must be True"),
    "an odd number to rotate": (V3, {"qk_rope_head_dim": 63}, "qk_rope_head_dim: must be even"),
    "another activation": (V2, {"hidden_act": "gelu"}, "hidden_act: must be 'silu'"),
}


@pytest.mark.parametrize(("entries", "change", "told"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_computed_is_refused_by_its_name(entries, change, told):
    with pytest.raises(ConfigError, match=rf"^model.path: config.json: {told}"):
        read(entries | change)


def test_the_projection_to_values_lies_in_both_parts():
    spec = read(LITE)
    parts = {part.name: part for part in families.layout("deepseek_v2").layer_parts(spec, 3)}
    both = [
        (name, tensor.name, prod(tensor.shape))
        for name in ("attention_in", "attention_out")
        for tensor in parts[name].tensors
        if any("kv_b_proj" in each for each in tensor.checkpoint_names)
    ]
    assert both == [("attention_in", "kv_b", 16 * 256 * 512), ("attention_out", "v_up", 16 * 128 * 512)]
    assert spec.value_up_bytes == 16 * 128 * 512 * 2


def test_rows_of_each_block():
    tensor, rows = torch.arange(24).view(12, 2), TensorSlice(rows_of_each=RowsOfEach(1, 3, 4))
    assert rows.of(tensor)[:, 0].tolist() == [2, 4, 10, 12, 18, 20]
    assert rows.shape_of((12, 2)) == (6, 2)
    assert rows.shape_of((11, 2)) is None
