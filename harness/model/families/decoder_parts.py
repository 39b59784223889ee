"""Read entries of config.json and lay out tensors by their usual names, as most families do. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from harness.model.dimensions import require_countable
from harness.model.families.reading import ConfigReader, bad_entry, checked_dtype
from harness.model.layout import PartLayout, TensorSource, lay_out
from harness.model.spec import ModelSpec

if TYPE_CHECKING:
    from harness.model.recipe import RandomRecipe

SLIDES, SEES_ALL = "sliding_attention", "full_attention"  # kinds of layers in config.json


class DecoderLayout:
    """The layout of grouped-query attention and SwiGLU experts, where each matrix is a checkpoint tensor of its own.
    Families say what differs."""

    layers: ClassVar[str] = "model.layers"
    embedding: ClassVar[str] = "model.embed_tokens.weight"
    final_norm: ClassVar[str] = "model.norm.weight"
    harmless: ClassVar[Mapping[str, str]] = {}
    mlp: ClassVar[str] = "mlp"  # a layer's module that has router and experts
    experts: ClassVar[tuple[str, str, str]] = ("gate_proj", "up_proj", "down_proj")
    shared: ClassVar[str] = "shared_experts"  # the module of all shared experts together

    def layer_parts(self, spec: ModelSpec, layer: int) -> tuple[PartLayout, ...]:
        """Return attention_in, attention_out, then every expert: the order in which a pass first needs them."""
        return _layer_parts(self, spec, layer)

    def attention_part(self, spec: ModelSpec, layer: int) -> PartLayout | None:
        return None

    def reference_entries(self, spec: ModelSpec, entries: Mapping[str, Any]) -> dict[str, Any]:
        return dict(entries)

    def embedding_part(self, spec: ModelSpec) -> PartLayout:
        shape = (spec.vocab_size, spec.hidden_dim)
        return lay_out("embedding", spec.dtype, (TensorSource("embed", shape, (self.embedding,)),))

    def head_part(self, spec: ModelSpec) -> PartLayout:
        """Return the head. With tied embeddings `lm_head` is a copy of the embedding, so that this part stands alone,
        as in other models."""
        matrix = self.embedding if spec.tie_embeddings else "lm_head.weight"
        sources = (
            TensorSource("final_norm", (spec.hidden_dim,), (self.final_norm,)),
            TensorSource("lm_head", (spec.vocab_size, spec.hidden_dim), (matrix,)),
        )
        return lay_out("head", spec.dtype, sources)

    def attention_in_sources(self, spec: ModelSpec, prefix: str) -> tuple[TensorSource, ...]:
        module, rows = prefix + "self_attn.", (spec.q_dim, spec.kv_dim, spec.kv_dim)
        weights, biases = (tuple(f"{module}{each}_proj.{kind}" for each in "qkv") for kind in ("weight", "bias"))
        widths = (spec.head_dim, spec.head_dim) if spec.qk_norm == "head" else rows[:2]
        norms = (
            TensorSource(f"{x}_norm", (n,), (f"{module}{x}_norm.weight",)) for x, n in zip("qk", widths, strict=True)
        )
        return (
            TensorSource("input_norm", (spec.hidden_dim,), (prefix + "input_layernorm.weight",)),
            TensorSource("qkv", (sum(rows), spec.hidden_dim), weights, rows),
            *((TensorSource("qkv_bias", (sum(rows),), biases, rows),) if spec.qkv_bias else ()),
            *(norms if spec.qk_norm else ()),
        )

    def attention_out_sources(self, spec: ModelSpec, prefix: str) -> tuple[TensorSource, ...]:
        bias = TensorSource("o_bias", (spec.hidden_dim,), (prefix + "self_attn.o_proj.bias",))
        return (
            TensorSource("o", (spec.hidden_dim, spec.q_dim), (prefix + "self_attn.o_proj.weight",)),
            *((bias,) if spec.o_bias else ()),
            TensorSource("post_norm", (spec.hidden_dim,), (prefix + "post_attention_layernorm.weight",)),
        )

    def router_sources(self, spec: ModelSpec, prefix: str) -> tuple[TensorSource, ...]:
        name = f"{prefix}{self.mlp}.gate.weight"
        return (TensorSource("router", (spec.num_experts, spec.hidden_dim), (name,)),)

    def shared_sources(self, spec: ModelSpec, prefix: str) -> tuple[TensorSource, ...]:
        """Return the shared experts of a layer with a router, as one MLP, and their gate; nothing without any."""
        if not spec.shared_expert_dim:
            return ()
        module, hidden = f"{prefix}{self.mlp}.{self.shared}", spec.hidden_dim
        gate = TensorSource("shared_gate", (1, hidden), (f"{module}_gate.weight",))
        mlp = self.swiglu_sources(f"{module}.", spec.shared_expert_dim, hidden, "shared_")
        return (*mlp, gate) if spec.shared_expert_gate else mlp

    def dense_sources(self, spec: ModelSpec, prefix: str) -> tuple[TensorSource, ...]:
        """Return the MLP of a layer without router and experts."""
        return self.swiglu_sources(f"{prefix}{self.mlp}.", spec.dense_dim, spec.hidden_dim)

    def expert_sources(self, spec: ModelSpec, prefix: str, expert: int) -> tuple[TensorSource, ...]:
        return self.swiglu_sources(f"{prefix}{self.mlp}.experts.{expert}.", spec.expert_dim, spec.hidden_dim)

    def swiglu_sources(self, module: str, width: int, hidden: int, local: str = "") -> tuple[TensorSource, ...]:
        """Return the matrices of one MLP. Their local names begin with `local`."""
        gate, up, down = (f"{module}{name}.weight" for name in self.experts)
        return (
            TensorSource(local + "gate_up", (2 * width, hidden), (gate, up)),
            TensorSource(local + "down", (hidden, width), (down,)),
        )


@lru_cache(maxsize=1024)
def _layer_parts(layout: DecoderLayout, spec: ModelSpec, layer: int) -> tuple[PartLayout, ...]:
    prefix, is_dense = f"{layout.layers}.{layer}.", spec.is_dense(layer)
    mlp = (layout.dense_sources,) if is_dense else (layout.router_sources, layout.shared_sources)
    behind = [source for sources in (layout.attention_out_sources, *mlp) for source in sources(spec, prefix)]
    return (
        lay_out("attention_in", spec.dtype, layout.attention_in_sources(spec, prefix)),
        lay_out("attention_out", spec.dtype, behind),
        *(
            lay_out(f"expert.{expert}", spec.dtype, layout.expert_sources(spec, prefix, expert), expert=expert)
            for expert in range(0 if is_dense else spec.num_experts)
        ),
    )


def read_dimensions(
    read: ConfigReader, name: str, dtype: str, *, num_kv_heads: int | None, rope_theta: float, norm_eps: float
) -> dict[str, Any]:
    """Read the entries that all decoders with grouped-query attention have, as fields of `ModelSpec`, without those of
    the experts. The given numbers are what transformers assumes where config.json leaves the entry out; without
    `num_kv_heads` it assumes as many as query heads."""
    hidden_dim, num_heads = read.positive_int("hidden_size"), read.positive_int("num_attention_heads")
    absent = num_kv_heads is None or "num_key_value_heads" not in read.entries
    kv_heads = read.positive_int("num_key_value_heads", default=(num_kv_heads or num_heads) if absent else None)
    if num_heads % kv_heads:
        raise bad_entry("num_key_value_heads", f"must divide num_attention_heads {num_heads}, got {kv_heads}")
    head_dim = read.positive_int("head_dim", default=max(1, hidden_dim // num_heads))
    if head_dim % 2:
        raise bad_entry("head_dim", f"must be even (RoPE rotates pairs), got {head_dim}")
    vocab_size = read.positive_int("vocab_size")
    max_positions = read.positive_int("max_position_embeddings")
    return {
        "name": name,
        "num_layers": read.positive_int("num_hidden_layers"),
        "hidden_dim": hidden_dim,
        "num_heads": num_heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab_size,
        "max_positions": max_positions,
        **read.rope(rope_theta, max_positions=max_positions),
        "norm_eps": read.positive_float("rms_norm_eps", norm_eps),
        "tie_embeddings": read.flag("tie_word_embeddings", default=False),
        "eos_token_id": read.eos_token_id(vocab_size),
        "dtype": checked_dtype(dtype),
    }


def read_experts(read: ConfigReader, *, count: str, width: str) -> dict[str, Any]:
    """Read how many experts there are, from the entry `count` or its other name, and how large, from `width`."""
    count = read.name_of("num_experts" if count == "num_local_experts" else "num_local_experts", count)
    num_experts, experts_per_token = read.positive_int(count), read.positive_int("num_experts_per_tok")
    if experts_per_token > num_experts:
        raise bad_entry("num_experts_per_tok", f"must be at most {count} {num_experts}, got {experts_per_token}")
    require_countable("model.path", read.positive_int("num_hidden_layers"), num_experts)
    return {
        "num_experts": num_experts,
        "experts_per_token": experts_per_token,
        "expert_dim": read.positive_int(width),
    }


def read_dense_layers(read: ConfigReader) -> dict[str, Any]:
    """Read which layers have an ordinary MLP, as the Qwen families say it, and how wide that is."""
    num_layers, step = read.positive_int("num_hidden_layers"), read.positive_int("decoder_sparse_step", default=1)
    named = read.ints_below("mlp_only_layers", num_layers)
    dense = tuple(layer for layer in range(num_layers) if layer in named or (layer + 1) % step)
    if len(dense) == num_layers:
        raise bad_entry("mlp_only_layers" if named else "decoder_sparse_step", "must leave a layer with experts")
    return {"dense_layers": dense, "dense_dim": read.positive_int("intermediate_size") if dense else 0}


def read_layer_types(read: ConfigReader, default: list[str]) -> list[bool]:
    """Read by layer whether it has a sliding window. `default` are the kinds of layers where config.json says none."""
    kinds, num_layers = read.entries.get("layer_types"), read.positive_int("num_hidden_layers")
    kinds = default if kinds is None else kinds
    if not isinstance(kinds, list) or len(kinds) != num_layers or not set(kinds) <= {SLIDES, SEES_ALL}:
        raise bad_entry("layer_types", f"must be {num_layers} times {SLIDES!r} or {SEES_ALL!r}, got {kinds!r}")
    return [kind == SLIDES for kind in kinds]


def sliding_layers(slides: list[bool], key: str) -> Literal["all", "even"]:
    """Return which layers have a sliding window, as `ModelSpec` knows them. `key` is the entry that said so."""
    if all(slides):
        return "all"
    if slides != [layer % 2 == 0 for layer in range(len(slides))]:
        raise bad_entry(key, "must give a window to all layers, or to every second one from the first on")
    return "even"


def decoder_entries(recipe: RandomRecipe) -> dict[str, Any]:
    """Return the entries of config.json that all decoders with grouped-query attention have."""
    return {
        "model_type": recipe.family,
        "num_hidden_layers": recipe.num_layers,
        "hidden_size": recipe.hidden_dim,
        "num_attention_heads": recipe.num_heads,
        "num_key_value_heads": recipe.num_kv_heads,
        "head_dim": recipe.head_dim,
        "num_experts_per_tok": recipe.experts_per_token,
        "vocab_size": recipe.vocab_size,
        "max_position_embeddings": recipe.max_positions,
        "rms_norm_eps": recipe.norm_eps,
        "rope_parameters": rope_entries(recipe),
        "tie_word_embeddings": recipe.tie_embeddings,
        "initializer_range": recipe.weight_std,
    }


def rope_entries(recipe: RandomRecipe) -> dict[str, Any]:
    """Return the entries of `rope_parameters`, as transformers 5 names them."""
    stretched = {key: value for key, value in asdict(recipe.yarn).items() if value is not None} if recipe.yarn else {}
    return {"rope_type": "yarn" if stretched else "default", "rope_theta": recipe.rope_theta, **stretched}


def dense_entries(recipe: RandomRecipe) -> dict[str, Any]:
    """Return the entries of config.json that `read_dense_layers` reads."""
    dense = recipe.dense_layers
    return {"mlp_only_layers": list(dense), "intermediate_size": recipe.dense_dim} if dense else {}
