from copy import deepcopy
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig

from harness.config import ConfigError
from harness.model import families
from harness.model.layout import ALIGNMENT_BYTES
from harness.model.spec import ModelSpec

# Mixtral-8x7B-v0.1's published config.json, the entries that transformers 4 wrote.
MIXTRAL_8X7B = {
    "architectures": ["MixtralForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mixtral",
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 32000,
}
LAYOUT = families.layout("mixtral")


def spec_with(**changes) -> ModelSpec:
    return LAYOUT.spec_from_config({**MIXTRAL_8X7B, **changes}, "m", "bfloat16")


def test_mixtral_8x7b_has_its_published_size():
    spec = spec_with()
    assert spec.num_params == 46_702_792_704
    assert (spec.head_dim, spec.group_size, spec.kv_bytes_per_token_layer) == (128, 4, 4096)
    assert (spec.rope_theta, spec.eos_token_id, spec.max_positions) == (1e6, 2, 32768)


def all_parts(spec):
    layers = [part for layer in range(spec.num_layers) for part in LAYOUT.layer_parts(spec, layer)]
    return [LAYOUT.embedding_part(spec), *layers, LAYOUT.head_part(spec)]


@settings(max_examples=60)
@given(
    group=st.integers(1, 4),
    num_kv_heads=st.integers(1, 4),
    head_dim=st.sampled_from([2, 6, 16, 64]),
    hidden=st.integers(1, 300),
    expert_dim=st.integers(1, 300),
    num_experts=st.integers(2, 9),
    tied=st.booleans(),
    dtype=st.sampled_from(["float32", "bfloat16"]),
)
def test_parts_are_aligned_disjoint_and_hold_all_parameters(
    group, num_kv_heads, head_dim, hidden, expert_dim, num_experts, tied, dtype
):
    spec = replace(
        spec_with(num_hidden_layers=2, vocab_size=77, num_local_experts=num_experts, intermediate_size=expert_dim),
        num_heads=group * num_kv_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        hidden_dim=hidden,
        tie_embeddings=tied,
        dtype=dtype,
    )
    total_bytes = 0
    for part in all_parts(spec):
        end = 0
        for tensor in part.tensors:
            assert tensor.offset_bytes % ALIGNMENT_BYTES == 0 and tensor.offset_bytes >= end
            assert tensor.offset_bytes - end < ALIGNMENT_BYTES
            end = tensor.offset_bytes + tensor.nbytes
            total_bytes += tensor.nbytes
        assert part.nbytes >= end and part.nbytes % ALIGNMENT_BYTES == 0
    shared_bytes = spec.vocab_size * spec.hidden_dim * spec.dtype_bytes if tied else 0  # lm_head is a copy
    assert total_bytes == spec.model_bytes + shared_bytes
    names = [name for part in all_parts(spec) for tensor in part.tensors for name in tensor.checkpoint_names]
    assert len(names) - len(set(names)) == int(tied)


def test_parts_come_in_the_order_of_first_use():
    spec = spec_with()
    names = [part.name for part in LAYOUT.layer_parts(spec, 3)]
    assert names == ["attention_in", "attention_out", *(f"expert.{i}" for i in range(8))]
    attention_in, attention_out, expert = LAYOUT.layer_parts(spec, 3)[:3]
    assert [t.name for t in attention_in.tensors] == ["input_norm", "qkv"]
    assert [t.name for t in attention_out.tensors] == ["o", "post_norm", "router"]
    assert [(t.name, t.shape) for t in expert.tensors] == [("gate_up", (28672, 4096)), ("down", (4096, 14336))]
    assert expert.tensors[0].checkpoint_names == (
        "model.layers.3.block_sparse_moe.experts.0.w1.weight",
        "model.layers.3.block_sparse_moe.experts.0.w3.weight",
    )


@pytest.mark.parametrize("entry", ["rope_theta", "rope_parameters", "rope_scaling"])
def test_rope_theta_is_found_where_each_version_of_transformers_puts_it(entry):
    value = 5e5 if entry == "rope_theta" else {"rope_theta": 5e5, "rope_type": "default"}
    entries = {key: value for key, value in MIXTRAL_8X7B.items() if key != "rope_theta"} | {entry: value}
    assert LAYOUT.spec_from_config(entries, "m", "float32").rope_theta == 5e5


def test_entries_that_are_left_out_have_the_defaults_of_transformers():
    required = (
        *("model_type", "hidden_size", "intermediate_size", "max_position_embeddings", "num_attention_heads"),
        *("num_experts_per_tok", "num_hidden_layers", "num_local_experts", "vocab_size"),
    )
    entries = {key: MIXTRAL_8X7B[key] for key in required}
    spec, theirs = LAYOUT.spec_from_config(entries, "m", "float32"), AutoConfig.for_model(**entries)
    assert (spec.rope_theta, spec.norm_eps) == (theirs.rope_parameters["rope_theta"], theirs.rms_norm_eps)
    assert (spec.num_kv_heads, spec.tie_embeddings) == (theirs.num_key_value_heads, theirs.tie_word_embeddings)
    assert (spec.head_dim, spec.sliding_window) == (4096 // 32, theirs.sliding_window)


def test_where_both_entries_for_rope_are_there_transformers_choice_counts():
    both = {"rope_scaling": {"type": "default", "rope_theta": 3e5}, "rope_parameters": {"rope_theta": 5e5}}
    theirs = AutoConfig.for_model(**{**MIXTRAL_8X7B, **deepcopy(both)})
    assert spec_with(**both).rope_theta == theirs.rope_parameters["rope_theta"]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_size": None}, "hidden_size: missing"),
        ({"num_local_experts": "8"}, "num_local_experts: must be a positive integer, got '8'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers: must be a positive integer, got 0"),
        ({"vocab_size": True}, "vocab_size: must be a positive integer"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok: must be at most num_local_experts 8, got 9"),
        ({"num_key_value_heads": 5}, "num_key_value_heads: must divide num_attention_heads 32, got 5"),
        ({"head_dim": 3}, "head_dim: must be even"),
        ({"rms_norm_eps": -1}, "rms_norm_eps: must be a positive number, got -1"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps: must be a positive number, got inf"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps: must be a positive number, got nan"),
        ({"rope_theta": float("inf")}, "rope_theta: must be a positive number, got inf"),
        ({"rope_parameters": {"rope_theta": float("nan")}}, "rope_theta: must be a positive number, got nan"),
        ({"num_key_value_heads": None}, "num_key_value_heads: missing"),
        ({"hidden_act": "gelu"}, "hidden_act: must be 'silu', got 'gelu'"),
        ({"sliding_window": 0}, "sliding_window: must be a positive integer"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings: must be true or false"),
        ({"eos_token_id": 32000}, "eos_token_id: must be a token id, or a list of them, below vocab_size 32000"),
        ({"eos_token_id": [1, 32000]}, "eos_token_id: must be a token id, or a list of them, below vocab_size 32000"),
        ({"eos_token_id": []}, "eos_token_id: must be a token id, or a list of them"),
        ({"eos_token_id": True}, "eos_token_id: must be a token id, or a list of them"),
        ({"rope_parameters": 3}, "rope_parameters: must be a mapping, the same for all layers, got 3"),
        ({"model_type": "mistral"}, "model_type: must be 'mixtral', got 'mistral'"),
    ],
)
def test_bad_entries_are_named(changes, named):
    with pytest.raises(ConfigError) as raised:
        spec_with(**changes)
    assert raised.value.field == "model.path" and named in raised.value.message
    assert "\n" not in str(raised.value)


def test_impossible_dtype_and_unknown_family_say_what_is_valid():
    with pytest.raises(ConfigError, match=r"model\.dtype: must be float32, bfloat16 or float16, got 'int8'"):
        LAYOUT.spec_from_config(MIXTRAL_8X7B, "m", "int8")
    with pytest.raises(ConfigError, match=r"unknown family 'llama'; available: .*mixtral"):
        families.family("llama")


def test_every_family_offers_the_whole_interface():
    for name in families.available():
        for protocol, module in (
            (families.FamilyLayout, families.layout(name)),
            (families.Family, families.family(name)),
        ):
            functions = {f for f in dir(protocol) if not f.startswith("_")}
            if not hasattr(module, "latents_in"):
                functions -= {"latents_in", "from_latents"}  # only where latents are cached
            assert functions and all(callable(getattr(module, f, None)) for f in functions), name
