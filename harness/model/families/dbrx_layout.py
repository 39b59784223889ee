"""Read DBRX's dimensions from config.json, and say where each tensor lies. Torch-free; the math is in `dbrx.py`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar

from harness.model.dimensions import Router, require_countable
from harness.model.families.decoder_parts import DecoderLayout, rope_entries
from harness.model.families.reading import ConfigReader, bad_entry, checked_dtype, refuse_unknown
from harness.model.layout import Section, TensorSlice, TensorSource
from harness.model.spec import ModelSpec

if TYPE_CHECKING:
    from harness.model.recipe import RandomRecipe

NORM_EPS = 1e-5  # no entry says it
ROPE_THETA = 1e4  # transformers' own, where no entry says it
_OF_ALL_CONFIGS = ("model_type", "is_encoder_decoder")  # transformers writes them into parts of a config as well
ATTENTION_ENTRIES = ("kv_n_heads", "clip_qkv", "rope_theta", *_OF_ALL_CONFIGS)
EXPERT_ENTRIES = (
    *("moe_num_experts", "moe_top_k", "moe_normalize_expert_weights", "ffn_hidden_size", "ffn_act_fn"),
    *("hidden_size", *_OF_ALL_CONFIGS),  # the model's hidden size once more
)


class DbrxLayout(DecoderLayout):
    """The layout of fused tensors: one for queries, keys and values, and three that have the rows of all experts."""

    harmless: ClassVar = {"num_key_value_heads": "repeats attn_config.kv_n_heads"}
    layers = "transformer.blocks"
    embedding = "transformer.wte.weight"
    final_norm = "transformer.norm_f.weight"

    def spec_from_config(self, config: Mapping[str, Any], name: str, dtype: str) -> ModelSpec:
        """Return the model's dimensions. Raises `ConfigError` naming the first missing or impossible entry of
        config.json."""
        read = ConfigReader(config)
        read.must_equal("model_type", "dbrx")
        read.must_equal("tie_word_embeddings", False)
        hidden_dim = read.positive_int(read.name_of("hidden_size", "d_model"))
        num_heads = read.positive_int(read.name_of("num_attention_heads", "n_heads"))
        num_layers = read.positive_int(read.name_of("num_hidden_layers", "n_layers"))
        vocab_size = read.positive_int("vocab_size")
        if hidden_dim % (2 * num_heads):
            raise bad_entry("d_model", f"must be an even multiple of n_heads {num_heads}, got {hidden_dim}")
        return ModelSpec(
            family="dbrx",
            name=name,
            num_layers=num_layers,
            hidden_dim=hidden_dim,
            num_heads=num_heads,
            head_dim=hidden_dim // num_heads,
            vocab_size=vocab_size,
            norm_eps=NORM_EPS,
            eos_token_id=read.eos_token_id(vocab_size),
            dtype=checked_dtype(dtype),
            **_read_attention(read, num_heads),
            **_read_experts(read, num_layers),
        )

    def config_from_recipe(self, recipe: RandomRecipe) -> dict[str, Any]:
        return {
            "model_type": recipe.family,
            "d_model": recipe.hidden_dim,
            "n_heads": recipe.num_heads,
            "n_layers": recipe.num_layers,
            "max_seq_len": recipe.max_positions,
            "vocab_size": recipe.vocab_size,
            "attn_config": {
                "kv_n_heads": recipe.num_kv_heads,
                "clip_qkv": recipe.clip_qkv,
                "rope_theta": recipe.rope_theta,
            },
            "ffn_config": {
                "moe_num_experts": recipe.num_experts,
                "moe_top_k": recipe.experts_per_token,
                "ffn_hidden_size": recipe.expert_dim,
                "moe_normalize_expert_weights": 1.0 if recipe.router.renormalise else None,
            },
            "rope_parameters": rope_entries(recipe),
            "initializer_range": recipe.weight_std,
        }

    def reference_entries(self, spec: ModelSpec, entries: Mapping[str, Any]) -> dict[str, Any]:
        """Return the entries that were read, with the base of RoPE where transformers looks for it: published files
        have it elsewhere."""
        theta = {"rope_theta": spec.rope_theta}
        return {**entries, **theta, "attn_config": {**(entries.get("attn_config") or {}), **theta}}

    def attention_in_sources(self, spec: ModelSpec, prefix: str) -> tuple[TensorSource, ...]:
        module, heads, kv_heads = prefix + "norm_attn_norm.", spec.num_heads, spec.num_kv_heads
        ends = (0, heads, heads + kv_heads, heads + 2 * kv_heads)
        fused = [TensorSlice((Section(start, stop, ends[-1]),)) for start, stop in pairwise(ends)]
        rows = (spec.q_dim, spec.kv_dim, spec.kv_dim)
        return (
            TensorSource("input_norm", (spec.hidden_dim,), (module + "norm_1.weight",)),
            TensorSource("qkv", (sum(rows), spec.hidden_dim), (module + "attn.Wqkv.weight",) * 3, rows, tuple(fused)),
        )

    def attention_out_sources(self, spec: ModelSpec, prefix: str) -> tuple[TensorSource, ...]:
        module = prefix + "norm_attn_norm."
        return (
            TensorSource("o", (spec.hidden_dim, spec.q_dim), (module + "attn.out_proj.weight",)),
            TensorSource("post_norm", (spec.hidden_dim,), (module + "norm_2.weight",)),
        )

    def router_sources(self, spec: ModelSpec, prefix: str) -> tuple[TensorSource, ...]:
        return (TensorSource("router", (spec.num_experts, spec.hidden_dim), (prefix + "ffn.router.layer.weight",)),)

    def expert_sources(self, spec: ModelSpec, prefix: str, expert: int) -> tuple[TensorSource, ...]:
        """Return the rows of one expert. Those of the down projection lie transposed."""
        rows, module = Section(expert, expert + 1, spec.num_experts), prefix + "ffn.experts.mlp."
        gate_up = TensorSource(
            "gate_up",
            (2 * spec.expert_dim, spec.hidden_dim),
            (module + "w1", module + "v1"),
            slices=(TensorSlice((rows,)),) * 2,
        )
        down = TensorSource(
            "down",
            (spec.hidden_dim, spec.expert_dim),
            (module + "w2",),
            slices=(TensorSlice((rows,), transposed=True),),
        )
        return gate_up, down


def _below(read: ConfigReader, key: str, known: Collection[str]) -> ConfigReader:
    """Return a reader of the entries inside an entry, which errors name with both names. Those are refused that are not
    `known`."""
    nested = read.entries.get(key)
    nested = {} if nested is None else nested
    if not isinstance(nested, Mapping):
        raise bad_entry(key, f"must be a mapping, got {nested!r}")
    refuse_unknown(nested, known, prefix=f"{key}.")
    return ConfigReader({f"{key}.{name}": value for name, value in nested.items()})


def _read_attention(read: ConfigReader, num_heads: int) -> dict[str, Any]:
    """Read `attn_config` and RoPE, whose base published files have there."""
    own = _below(read, "attn_config", ATTENTION_ENTRIES)
    kv_heads = own.positive_int("attn_config.kv_n_heads", default=1)
    if num_heads % kv_heads:
        raise bad_entry("attn_config.kv_n_heads", f"must divide n_heads {num_heads}, got {kv_heads}")
    max_positions = read.positive_int(read.name_of("max_position_embeddings", "max_seq_len"))
    theta = own.optional_positive_float("attn_config.rope_theta")
    rope = read.rope(theta or ROPE_THETA, max_positions=max_positions)
    if theta not in (None, rope["rope_theta"]):
        raise bad_entry("attn_config.rope_theta", f"must be {rope['rope_theta']} as in rope_parameters, got {theta}")
    clip = own.optional_positive_float("attn_config.clip_qkv")
    return {"num_kv_heads": kv_heads, "clip_qkv": clip, "max_positions": max_positions, **rope}


def _read_experts(read: ConfigReader, num_layers: int) -> dict[str, Any]:
    """Read `ffn_config`."""
    own = _below(read, "ffn_config", EXPERT_ENTRIES)
    num_experts, top_k = (own.positive_int(f"ffn_config.moe_{name}") for name in ("num_experts", "top_k"))
    if top_k > num_experts:
        raise bad_entry("ffn_config.moe_top_k", f"must be at most moe_num_experts {num_experts}, got {top_k}")
    require_countable("model.path", num_layers, num_experts)
    order = own.entries.get("ffn_config.moe_normalize_expert_weights", 1.0)  # of the norm that divides the weights
    if order not in (None, 1):
        raise bad_entry("ffn_config.moe_normalize_expert_weights", f"must be 1.0 or null, got {order!r}")
    _below(own, "ffn_config.ffn_act_fn", ("name",)).must_equal("ffn_config.ffn_act_fn.name", "silu")
    return {
        "num_experts": num_experts,
        "experts_per_token": top_k,
        "expert_dim": own.positive_int("ffn_config.ffn_hidden_size"),
        "router": Router(renormalise=order is not None),
    }


LAYOUT = DbrxLayout()
