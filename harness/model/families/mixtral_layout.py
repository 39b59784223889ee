"""Mixtral: dimensions from config.json, and where each tensor lies. Torch-free; the math is in `mixtral.py`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from harness.model.dimensions import require_countable
from harness.model.families.reading import ConfigReader, bad_entry, checked_dtype
from harness.model.layout import PartLayout, TensorSource, lay_out
from harness.model.spec import ModelSpec

if TYPE_CHECKING:
    from harness.model.config import RandomRecipe

# What transformers' MixtralConfig assumes for entries that a config.json leaves out.
DEFAULT_ROPE_THETA = 1e6
DEFAULT_NORM_EPS = 1e-5
DEFAULT_NUM_KV_HEADS = 8


def spec_from_config(config: Mapping[str, Any], name: str, dtype: str) -> ModelSpec:
    """Raises `ConfigError` naming the first missing or impossible entry of config.json."""
    read = ConfigReader(config)
    read.must_equal("model_type", "mixtral")
    read.must_equal("hidden_act", "silu")
    hidden_dim, num_heads = read.positive_int("hidden_size"), read.positive_int("num_attention_heads")
    absent = "num_key_value_heads" not in config
    num_kv_heads = read.positive_int("num_key_value_heads", default=DEFAULT_NUM_KV_HEADS if absent else None)
    if num_heads % num_kv_heads:
        raise bad_entry("num_key_value_heads", f"must divide num_attention_heads {num_heads}, got {num_kv_heads}")
    head_dim = read.positive_int("head_dim", default=max(1, hidden_dim // num_heads))
    if head_dim % 2:
        raise bad_entry("head_dim", f"must be even (RoPE rotates pairs), got {head_dim}")
    num_experts = read.positive_int("num_local_experts")
    experts_per_token = read.positive_int("num_experts_per_tok")
    if experts_per_token > num_experts:
        message = f"must be at most num_local_experts {num_experts}, got {experts_per_token}"
        raise bad_entry("num_experts_per_tok", message)
    num_layers = read.positive_int("num_hidden_layers")
    require_countable("model.path", num_layers, num_experts)
    vocab_size = read.positive_int("vocab_size")
    return ModelSpec(
        name=name,
        family="mixtral",
        num_layers=num_layers,
        hidden_dim=hidden_dim,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        num_experts=num_experts,
        experts_per_token=experts_per_token,
        expert_dim=read.positive_int("intermediate_size"),
        vocab_size=vocab_size,
        max_positions=read.positive_int("max_position_embeddings"),
        rope_theta=read.rope_theta(DEFAULT_ROPE_THETA),
        norm_eps=read.positive_float("rms_norm_eps", DEFAULT_NORM_EPS),
        sliding_window=read.optional_positive_int("sliding_window"),
        tie_embeddings=read.flag("tie_word_embeddings", default=False),
        eos_token_id=read.eos_token_id(vocab_size),
        dtype=checked_dtype(dtype),
    )


def config_from_recipe(recipe: RandomRecipe) -> dict[str, Any]:
    return {
        "model_type": "mixtral",
        "num_hidden_layers": recipe.num_layers,
        "hidden_size": recipe.hidden_dim,
        "num_attention_heads": recipe.num_heads,
        "num_key_value_heads": recipe.num_kv_heads,
        "head_dim": recipe.head_dim,
        "num_local_experts": recipe.num_experts,
        "num_experts_per_tok": recipe.experts_per_token,
        "intermediate_size": recipe.expert_dim,
        "vocab_size": recipe.vocab_size,
        "max_position_embeddings": recipe.max_positions,
        "rms_norm_eps": recipe.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": recipe.rope_theta},
        "sliding_window": recipe.sliding_window,
        "tie_word_embeddings": recipe.tie_embeddings,
        "initializer_range": recipe.weight_std,
    }


@lru_cache(maxsize=1024)
def layer_parts(spec: ModelSpec, layer: int) -> tuple[PartLayout, ...]:
    """attention_in, attention_out, then every expert: the order in which a pass first needs them."""
    prefix = f"model.layers.{layer}."
    hidden = spec.hidden_dim
    attention_in = (
        TensorSource("input_norm", (hidden,), (prefix + "input_layernorm.weight",)),
        TensorSource(
            "qkv",
            (spec.q_dim + 2 * spec.kv_dim, hidden),
            tuple(f"{prefix}self_attn.{projection}_proj.weight" for projection in "qkv"),
            (spec.q_dim, spec.kv_dim, spec.kv_dim),
        ),
    )
    attention_out = (
        TensorSource("o", (hidden, spec.q_dim), (prefix + "self_attn.o_proj.weight",)),
        TensorSource("post_norm", (hidden,), (prefix + "post_attention_layernorm.weight",)),
        TensorSource("router", (spec.num_experts, hidden), (prefix + "block_sparse_moe.gate.weight",)),
    )
    return (
        lay_out("attention_in", spec.dtype, attention_in),
        lay_out("attention_out", spec.dtype, attention_out),
        *(_expert_part(spec, prefix, expert) for expert in range(spec.num_experts)),
    )


def _expert_part(spec: ModelSpec, prefix: str, expert: int) -> PartLayout:
    weights = f"{prefix}block_sparse_moe.experts.{expert}."
    gate, up, down = (f"{weights}{name}.weight" for name in ("w1", "w3", "w2"))
    sources = (
        TensorSource("gate_up", (2 * spec.expert_dim, spec.hidden_dim), (gate, up)),
        TensorSource("down", (spec.hidden_dim, spec.expert_dim), (down,)),
    )
    return lay_out(f"expert.{expert}", spec.dtype, sources, expert=expert)


def embedding_part(spec: ModelSpec) -> PartLayout:
    shape = (spec.vocab_size, spec.hidden_dim)
    return lay_out("embedding", spec.dtype, (TensorSource("embed", shape, ("model.embed_tokens.weight",)),))


def head_part(spec: ModelSpec) -> PartLayout:
    """With tied embeddings `lm_head` is a copy of the embedding, so that this part stands alone as the others do."""
    matrix = "model.embed_tokens.weight" if spec.tie_embeddings else "lm_head.weight"
    sources = (
        TensorSource("final_norm", (spec.hidden_dim,), ("model.norm.weight",)),
        TensorSource("lm_head", (spec.vocab_size, spec.hidden_dim), (matrix,)),
    )
    return lay_out("head", spec.dtype, sources)
