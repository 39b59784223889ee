"""Read DeepSeek-V2's dimensions from config.json, and say where each tensor lies. Torch-free; the math is in
`deepseek_v2.py`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from harness.model.dimensions import Router
from harness.model.families.latent_parts import LatentLayout, latent_entries, read_groups, read_latent_dimensions
from harness.model.families.reading import ConfigReader, bad_entry
from harness.model.spec import ModelSpec

if TYPE_CHECKING:
    from harness.model.recipe import RandomRecipe

ANY, IN_GROUPS = "greedy", "group_limited_greedy"


class DeepseekV2Layout(LatentLayout):
    def spec_from_config(self, config: Mapping[str, Any], name: str, dtype: str) -> ModelSpec:
        """Return the model's dimensions. Raises `ConfigError` naming the first missing or impossible entry of
        config.json."""
        read = ConfigReader(config)
        read.must_equal("model_type", "deepseek_v2")
        read.must_equal("mlp_bias", False)
        read.must_equal("scoring_func", "softmax")
        read.must_equal("norm_topk_prob", False)  # transformers' router knows nothing else
        dimensions = read_latent_dimensions(read, name, dtype, num_experts="num_experts", num_dense=0)
        method = config.get("topk_method", ANY)
        if method not in (ANY, IN_GROUPS):
            raise bad_entry("topk_method", f"must be {ANY!r} or {IN_GROUPS!r}, got {method!r}")
        sizes = dimensions["num_experts"], dimensions["experts_per_token"]
        groups = read_groups(read, *sizes, scored_by=1) if method == IN_GROUPS else {}
        scale = read.positive_float("routed_scaling_factor", 1.0)
        return ModelSpec(family="deepseek_v2", router=Router(renormalise=False, scale=scale, **groups), **dimensions)

    def config_from_recipe(self, recipe: RandomRecipe) -> dict[str, Any]:
        return {**latent_entries(recipe), "topk_method": IN_GROUPS if recipe.router.num_groups > 1 else ANY}


LAYOUT = DeepseekV2Layout()
