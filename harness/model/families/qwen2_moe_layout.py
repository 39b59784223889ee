"""Read Qwen2-MoE's dimensions from config.json, and say where each tensor lies. Torch-free; the math is in
`qwen2_moe.py`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from harness.model.dimensions import Router
from harness.model.families.decoder_parts import (
    SEES_ALL,
    SLIDES,
    DecoderLayout,
    decoder_entries,
    dense_entries,
    read_dense_layers,
    read_dimensions,
    read_experts,
    read_layer_types,
    sliding_layers,
)
from harness.model.families.reading import ConfigReader, bad_entry
from harness.model.spec import ModelSpec

if TYPE_CHECKING:
    from harness.model.recipe import RandomRecipe


class Qwen2MoeLayout(DecoderLayout):
    harmless: ClassVar = {
        **dict.fromkeys(("sliding_window", "max_window_layers"), "counts with use_sliding_window alone"),
        "intermediate_size": "counts in layers without experts alone",
    }
    shared = "shared_expert"

    def spec_from_config(self, config: Mapping[str, Any], name: str, dtype: str) -> ModelSpec:
        """Return the model's dimensions. Raises `ConfigError` naming the first missing or impossible entry of
        config.json."""
        read = ConfigReader(config)
        read.must_equal("model_type", "qwen2_moe")
        read.must_equal("hidden_act", "silu")
        return ModelSpec(
            family="qwen2_moe",
            qkv_bias=read.flag("qkv_bias", default=True),
            shared_expert_dim=read.positive_int("shared_expert_intermediate_size"),
            shared_expert_gate=True,
            router=Router(renormalise=read.flag("norm_topk_prob", default=False)),
            **read_dimensions(read, name, dtype, num_kv_heads=16, rope_theta=1e4, norm_eps=1e-6),
            **read_experts(read, count="num_experts", width="moe_intermediate_size"),
            **read_dense_layers(read),
            **_read_windows(read),
        )

    def config_from_recipe(self, recipe: RandomRecipe) -> dict[str, Any]:
        window, layers = recipe.sliding_window, range(recipe.num_layers)
        kinds = [SLIDES if recipe.sliding_layers == "all" or layer % 2 == 0 else SEES_ALL for layer in layers]
        return {
            **decoder_entries(recipe),
            **dense_entries(recipe),
            "num_experts": recipe.num_experts,
            "moe_intermediate_size": recipe.expert_dim,
            "shared_expert_intermediate_size": recipe.shared_expert_dim,
            "norm_topk_prob": recipe.router.renormalise,
            **({"use_sliding_window": True, "sliding_window": window, "layer_types": kinds} if window else {}),
        }


def _read_windows(read: ConfigReader) -> dict[str, Any]:
    """Read which layers have a sliding window: those of `layer_types`; without it every second one, from the first on
    and below `max_window_layers`."""
    num_layers, uses_window = read.positive_int("num_hidden_layers"), read.flag("use_sliding_window", default=False)
    until = read.positive_int("max_window_layers", default=28) if uses_window else 0
    slides = read_layer_types(
        read, [SLIDES if layer % 2 == 0 and layer < until else SEES_ALL for layer in range(num_layers)]
    )
    if not any(slides):
        return {}
    key = "max_window_layers" if read.entries.get("layer_types") is None else "layer_types"
    if not uses_window:
        raise bad_entry(key, f"must be all {SEES_ALL!r} without use_sliding_window")
    window = read.optional_positive_int("sliding_window", default=4096)
    if window is None:
        raise bad_entry("sliding_window", "must be a positive integer with use_sliding_window, got None")
    return {"sliding_window": window, "sliding_layers": sliding_layers(slides, key)}


LAYOUT = Qwen2MoeLayout()
