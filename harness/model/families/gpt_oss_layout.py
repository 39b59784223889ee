"""Read gpt-oss's dimensions from config.json, and say where each tensor lies. Torch-free; the math is in
`gpt_oss.py`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from harness.model.dimensions import ClampedSwiglu, Yarn
from harness.model.families.decoder_parts import (
    SEES_ALL,
    SLIDES,
    DecoderLayout,
    decoder_entries,
    read_dimensions,
    read_experts,
    read_layer_types,
    sliding_layers,
)
from harness.model.families.reading import ConfigReader, bad_entry
from harness.model.layout import PartLayout, Section, TensorSlice, TensorSource, lay_out
from harness.model.spec import ModelSpec

if TYPE_CHECKING:
    from harness.model.recipe import RandomRecipe

YARN = Yarn(factor=32.0, original_max_position_embeddings=4096, truncate=False)  # where config.json says nothing
GATE_UP = tuple(Section(i, i + 1, 2, interleaved=True) for i in (0, 1))  # gate and up projections take turns
ALL = Section(0, 1, 1)


class GptOssLayout(DecoderLayout):
    """The layout of fused tensors that hold all experts of a layer, their matrices transposed."""

    harmless: ClassVar = {
        "experts_per_token": "repeats num_experts_per_tok",
        "initial_context_length": "repeats rope_scaling.original_max_position_embeddings",
    }

    def spec_from_config(self, config: Mapping[str, Any], name: str, dtype: str) -> ModelSpec:
        """Return the model's dimensions. Raises `ConfigError` naming the first missing or impossible entry of
        config.json."""
        read = ConfigReader(config)
        read.must_equal("model_type", "gpt_oss")
        read.must_equal("hidden_act", "silu")
        bias = read.flag("attention_bias", default=True)
        activation = ClampedSwiglu(
            limit=read.positive_float("swiglu_limit", 7.0), alpha=read.positive_float("swiglu_alpha", 1.702)
        )
        read.positive_int("head_dim")  # needed: transformers assumes 64, which few widths go with
        dimensions = read_dimensions(read, name, dtype, num_kv_heads=8, rope_theta=1.5e5, norm_eps=1e-5)
        if not config.get("rope_scaling") and config.get("rope_parameters") is None:
            dimensions["yarn"] = YARN
        return ModelSpec(
            family="gpt_oss",
            qkv_bias=bias,
            o_bias=bias,
            attention_sinks=True,
            router_bias=True,
            expert_bias=True,
            clamped_swiglu=activation,
            **dimensions,
            **read_experts(read, count="num_local_experts", width="intermediate_size"),
            **_read_windows(read),
        )

    def config_from_recipe(self, recipe: RandomRecipe) -> dict[str, Any]:
        window, activation = recipe.sliding_window, recipe.clamped_swiglu or ClampedSwiglu()
        slides = [window and (recipe.sliding_layers == "all" or layer % 2 == 0) for layer in range(recipe.num_layers)]
        return {
            **decoder_entries(recipe),
            "num_local_experts": recipe.num_experts,
            "intermediate_size": recipe.expert_dim,
            "layer_types": [SLIDES if each else SEES_ALL for each in slides],
            "sliding_window": window,
            "attention_bias": recipe.qkv_bias,
            "swiglu_limit": activation.limit,
            "swiglu_alpha": activation.alpha,
        }

    def attention_part(self, spec: ModelSpec, layer: int) -> PartLayout:
        name = f"{self.layers}.{layer}.self_attn.sinks"
        return lay_out("attention", "float32", (TensorSource("sinks", (spec.num_heads,), (name,)),))

    def router_sources(self, spec: ModelSpec, prefix: str) -> tuple[TensorSource, ...]:
        module = prefix + "mlp.router."
        return (
            TensorSource("router", (spec.num_experts, spec.hidden_dim), (module + "weight",)),
            TensorSource("router_bias", (spec.num_experts,), (module + "bias",)),
        )

    def expert_sources(self, spec: ModelSpec, prefix: str, expert: int) -> tuple[TensorSource, ...]:
        module, hidden, width = prefix + "mlp.experts.", spec.hidden_dim, spec.expert_dim
        matrices = tuple(TensorSlice((expert, ALL, share), transposed=True) for share in GATE_UP)
        biases = tuple(TensorSlice((expert, share)) for share in GATE_UP)
        one = TensorSlice((expert,), transposed=True)
        return (
            TensorSource("gate_up", (2 * width, hidden), (module + "gate_up_proj",) * 2, slices=matrices),
            TensorSource("gate_up_bias", (2 * width,), (module + "gate_up_proj_bias",) * 2, slices=biases),
            TensorSource("down", (hidden, width), (module + "down_proj",), slices=(one,)),
            TensorSource(
                "down_bias",
                (hidden,),
                (module + "down_proj_bias",),
                slices=(TensorSlice((expert,)),),
                added_once=True,
            ),
        )


def _read_windows(read: ConfigReader) -> dict[str, Any]:
    """Read which layers have a sliding window; without `layer_types` every second one, from the first on."""
    num_layers = read.positive_int("num_hidden_layers")
    slides = read_layer_types(read, [SEES_ALL if layer % 2 else SLIDES for layer in range(num_layers)])
    if not any(slides):
        return {}
    window = read.optional_positive_int("sliding_window", default=128)
    if window is None:
        raise bad_entry("sliding_window", f"must be a positive integer with {SLIDES!r} in layer_types, got None")
    return {"sliding_window": window, "sliding_layers": sliding_layers(slides, "layer_types")}


LAYOUT = GptOssLayout()
