"""Read Mixtral's dimensions from config.json, and say where each tensor lies. Torch-free; the math is in
`mixtral.py`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from harness.model.families.decoder_parts import DecoderLayout, decoder_entries, read_dimensions, read_experts
from harness.model.families.reading import ConfigReader
from harness.model.spec import ModelSpec

if TYPE_CHECKING:
    from harness.model.recipe import RandomRecipe


class MixtralLayout(DecoderLayout):
    mlp = "block_sparse_moe"
    experts = ("w1", "w3", "w2")

    def spec_from_config(self, config: Mapping[str, Any], name: str, dtype: str) -> ModelSpec:
        """Return the model's dimensions. Raises `ConfigError` naming the first missing or impossible entry of
        config.json."""
        read = ConfigReader(config)
        read.must_equal("model_type", "mixtral")
        read.must_equal("hidden_act", "silu")
        return ModelSpec(
            family="mixtral",
            sliding_window=read.optional_positive_int("sliding_window"),
            **read_dimensions(read, name, dtype, num_kv_heads=8, rope_theta=1e6, norm_eps=1e-5),
            **read_experts(read, count="num_local_experts", width="intermediate_size"),
        )

    def config_from_recipe(self, recipe: RandomRecipe) -> dict[str, Any]:
        return {
            **decoder_entries(recipe),
            "num_local_experts": recipe.num_experts,
            "intermediate_size": recipe.expert_dim,
            "sliding_window": recipe.sliding_window,
        }


LAYOUT = MixtralLayout()
