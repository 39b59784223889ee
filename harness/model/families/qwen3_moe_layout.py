"""Read Qwen3-MoE's dimensions from config.json, and say where each tensor lies. Torch-free; the math is in
`qwen3_moe.py`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from harness.model.dimensions import Router
from harness.model.families.decoder_parts import (
    DecoderLayout,
    decoder_entries,
    dense_entries,
    read_dense_layers,
    read_dimensions,
    read_experts,
)
from harness.model.families.reading import ConfigReader
from harness.model.spec import ModelSpec

if TYPE_CHECKING:
    from harness.model.recipe import RandomRecipe


class Qwen3MoeLayout(DecoderLayout):
    harmless: ClassVar = {
        **dict.fromkeys(("sliding_window", "max_window_layers"), "counts with use_sliding_window alone"),
        "intermediate_size": "counts in layers without experts alone",
    }

    def spec_from_config(self, config: Mapping[str, Any], name: str, dtype: str) -> ModelSpec:
        """Return the model's dimensions. Raises `ConfigError` naming the first missing or impossible entry of
        config.json."""
        read = ConfigReader(config)
        read.must_equal("model_type", "qwen3_moe")
        read.must_equal("hidden_act", "silu")
        bias, slides = read.flag("attention_bias", default=False), read.flag("use_sliding_window", default=False)
        return ModelSpec(
            family="qwen3_moe",
            qk_norm="head",
            qkv_bias=bias,
            o_bias=bias,
            sliding_window=read.optional_positive_int("sliding_window", default=4096) if slides else None,
            router=Router(renormalise=read.flag("norm_topk_prob", default=False)),
            **read_dimensions(read, name, dtype, num_kv_heads=4, rope_theta=1e4, norm_eps=1e-6),
            **read_experts(read, count="num_experts", width="moe_intermediate_size"),
            **read_dense_layers(read),
        )

    def config_from_recipe(self, recipe: RandomRecipe) -> dict[str, Any]:
        window = recipe.sliding_window
        return {
            **decoder_entries(recipe),
            **dense_entries(recipe),
            "num_local_experts": recipe.num_experts,  # as transformers writes it
            "moe_intermediate_size": recipe.expert_dim,
            "norm_topk_prob": recipe.router.renormalise,
            "attention_bias": recipe.qkv_bias,
            **({"use_sliding_window": True, "sliding_window": window} if window else {}),
        }


LAYOUT = Qwen3MoeLayout()
