"""Read the dimensions of DeepSeek-V3, R1 and Moonlight from config.json, and say where each tensor lies. Torch-free;
the math is in `deepseek_v3.py`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from harness.model.dimensions import Router
from harness.model.families.latent_parts import LatentLayout, latent_entries, read_groups, read_latent_dimensions
from harness.model.families.reading import ConfigReader
from harness.model.layout import TensorSource
from harness.model.spec import ModelSpec

if TYPE_CHECKING:
    from harness.model.recipe import RandomRecipe


class DeepseekV3Layout(LatentLayout):
    def spec_from_config(self, config: Mapping[str, Any], name: str, dtype: str) -> ModelSpec:
        """Return the model's dimensions. Raises `ConfigError` naming the first missing or impossible entry of
        config.json."""
        read = ConfigReader(config)
        only = {"model_type": "deepseek_v3", "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
        for entry, value in {**only, "rope_interleave": True}.items():
            read.must_equal(entry, value)
        dimensions = read_latent_dimensions(read, name, dtype, num_experts="num_local_experts", num_dense=3)
        router = Router(
            scoring="sigmoid",
            renormalise=read.flag("norm_topk_prob", default=True),
            scale=read.positive_float("routed_scaling_factor", 2.5),
            **read_groups(
                *(read, dimensions["num_experts"], dimensions["experts_per_token"]), scored_by=2, groups=8, best=4
            ),
        )
        return ModelSpec(family="deepseek_v3", router=router, correction_bias=True, **dimensions)

    def config_from_recipe(self, recipe: RandomRecipe) -> dict[str, Any]:
        return latent_entries(recipe)

    def router_sources(self, spec: ModelSpec, prefix: str) -> tuple[TensorSource, ...]:
        name = f"{prefix}{self.mlp}.gate.e_score_correction_bias"
        bias = TensorSource("correction_bias", (spec.num_experts,), (name,), dtype="float32")
        return (*super().router_sources(spec, prefix), bias)


LAYOUT = DeepseekV3Layout()
