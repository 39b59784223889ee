"""Read OLMoE's dimensions from config.json, and say where each tensor lies. Torch-free; the math is in `olmoe.py`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from harness.model.dimensions import Router
from harness.model.families.decoder_parts import DecoderLayout, decoder_entries, read_dimensions, read_experts
from harness.model.families.reading import ConfigReader, bad_entry
from harness.model.spec import ModelSpec

if TYPE_CHECKING:
    from harness.model.recipe import RandomRecipe


class OlmoeLayout(DecoderLayout):
    def spec_from_config(self, config: Mapping[str, Any], name: str, dtype: str) -> ModelSpec:
        """Return the model's dimensions. Raises `ConfigError` naming the first missing or impossible entry of
        config.json."""
        read = ConfigReader(config)
        read.must_equal("model_type", "olmoe")
        read.must_equal("hidden_act", "silu")
        read.must_equal("sliding_window", None)
        dimensions = read_dimensions(read, name, dtype, num_kv_heads=None, rope_theta=1e4, norm_eps=1e-5)
        hidden_dim, num_heads, head_dim = (dimensions[key] for key in ("hidden_dim", "num_heads", "head_dim"))
        if num_heads * head_dim != hidden_dim:  # transformers' norm of all queries is as wide as the hidden states
            raise bad_entry("head_dim", f"must be hidden_size {hidden_dim} / {num_heads} heads, got {head_dim}")
        bias = read.flag("attention_bias", default=False)
        return ModelSpec(
            family="olmoe",
            qk_norm="full",
            qkv_bias=bias,
            o_bias=bias,
            clip_qkv=read.optional_positive_float("clip_qkv"),
            router=Router(renormalise=read.flag("norm_topk_prob", default=False)),
            **dimensions,
            **read_experts(read, count="num_experts", width="intermediate_size"),
        )

    def config_from_recipe(self, recipe: RandomRecipe) -> dict[str, Any]:
        return {
            **decoder_entries(recipe),
            "num_experts": recipe.num_experts,
            "intermediate_size": recipe.expert_dim,
            "norm_topk_prob": recipe.router.renormalise,
            "attention_bias": recipe.qkv_bias,
            "clip_qkv": recipe.clip_qkv,
        }


LAYOUT = OlmoeLayout()
