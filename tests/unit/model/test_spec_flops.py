"""FLOPs of a spec against those that PyTorch counts while transformers runs a small model of the same architecture."""

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from harness.model.dimensions import LatentAttention
from harness.model.spec import ModelSpec

NUM_TOKENS = 13
LATENT: dict[str, Any] = {"kv_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 20}
DEEPSEEK: dict[str, Any] = {
    **LATENT,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_shared_experts": 2,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 3,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "mixtral": {**COMMON, "intermediate_size": 40, "num_local_experts": 8},
    "qwen2_moe": {
        **COMMON,
        "moe_intermediate_size": 40,
        "num_experts": 8,
        "shared_expert_intermediate_size": 56,
    },
    "qwen3_moe": {**COMMON, "moe_intermediate_size": 40, "num_experts": 8, "head_dim": 24},
    "olmoe": {**COMMON, "intermediate_size": 40, "num_experts": 8},
    "gpt_oss": {**COMMON, "intermediate_size": 40, "num_local_experts": 8, "head_dim": 24, "sliding_window": 5},
    "dbrx": {
        "d_model": 64,
        "n_heads": 4,
        "n_layers": 3,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 40, "moe_num_experts": 8, "moe_top_k": 3},
    },
    "deepseek_v2": {**DEEPSEEK, "q_lora_rank": None, "topk_method": "greedy"},
    "deepseek_v3": {**DEEPSEEK, "q_lora_rank": 32},
}
OF_FAMILY: dict[str, dict[str, Any]] = {
    "qwen2_moe": {"shared_expert_dim": 56, "shared_expert_gate": True, "qkv_bias": True},
    "qwen3_moe": {"head_dim": 24, "qk_norm": "head"},
    "olmoe": {"qk_norm": "full"},
    "gpt_oss": {"head_dim": 24, "qkv_bias": True, "o_bias": True, "expert_bias": True, "router_bias": True},
}


def spec_of(family: str) -> ModelSpec:
    values: dict[str, Any] = {
        "name": family,
        "family": family,
        "num_layers": 3,
        "hidden_dim": 64,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "num_experts": 8,
        "experts_per_token": 3,
        "expert_dim": 40,
        "vocab_size": 300,
        "max_positions": 64,
        "rope_theta": 1e4,
        "norm_eps": 1e-5,
    } | OF_FAMILY.get(family, {})
    if family.startswith("deepseek"):
        latent = LatentAttention(
            kv_rank=24, nope_dim=16, rope_dim=8, value_dim=20, q_rank=32 if family == "deepseek_v3" else None
        )
        values |= {"latent": latent, "head_dim": 24, "num_kv_heads": 4, "shared_expert_dim": 80}
        values |= {"dense_layers": (0,), "dense_dim": 96}
    return ModelSpec(**values)


@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_flops_are_those_that_pytorch_counts(family):
    config = AutoConfig.for_model(
        family, **CONFIGS[family], vocab_size=300, max_position_embeddings=64, pad_token_id=None
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", experts_implementation="eager")
    model.requires_grad_(False)
    spec = spec_of(family)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.arange(NUM_TOKENS)[None], use_cache=False)
    pairs = NUM_TOKENS**2  # eager attention computes them all and masks afterwards
    attention_flops = pairs * spec.num_layers * spec.prefill_pair_flops
    assert counter.get_total_flops() == NUM_TOKENS * spec.flops_per_token + attention_flops


def test_a_layers_flops_are_the_parts_of_a_moe_layer():
    for family in CONFIGS:
        spec = spec_of(family)
        outside = sum(spec.components[name].flops_per_token for name in ("head", "dense_mlp"))
        of_layers = spec.flops_per_token - outside
        attention_of_dense = len(spec.dense_layers) * 2 * spec.attention_params
        assert spec.num_moe_layers * spec.flops_per_token_layer == of_layers - attention_of_dense


def test_absorbed_attention_costs_what_decode_pairs_say():
    """Queries projected into the latent's space, scores and weighted sums there, out again by the value projection."""
    spec, context = spec_of("deepseek_v3"), 50
    latent = spec.latent
    assert latent is not None
    to_latent = torch.randn(spec.num_heads, latent.nope_dim, latent.kv_rank)
    to_values = torch.randn(spec.num_heads, latent.kv_rank, latent.value_dim)
    queries = torch.randn(spec.num_heads, 1, latent.nope_dim)
    rope_queries = torch.randn(spec.num_heads, latent.rope_dim)
    cached, rope_keys = torch.randn(context, latent.kv_rank), torch.randn(context, latent.rope_dim)
    with FlopCounterMode(display=False) as counter:
        absorbed = (queries @ to_latent)[:, 0]
        scores = absorbed @ cached.T + rope_queries @ rope_keys.T
        out = (scores.softmax(-1) @ cached)[:, None] @ to_values
    assert out.shape == (spec.num_heads, 1, latent.value_dim)
    absorbed_params = latent.kv_rank * spec.num_heads * (latent.nope_dim + latent.value_dim)  # kv_b's, already counted
    assert counter.get_total_flops() == 2 * absorbed_params + context * spec.decode_pair_flops
