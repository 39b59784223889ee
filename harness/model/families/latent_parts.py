"""Read the entries of DeepSeek's config.json, and lay out the tensors of latent attention. Torch-free."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from harness.config import require
from harness.model.dimensions import LatentAttention, require_countable
from harness.model.families.decoder_parts import DecoderLayout, decoder_entries
from harness.model.families.reading import ConfigReader, bad_entry, checked_dtype
from harness.model.layout import RowsOfEach, TensorSlice, TensorSource
from harness.model.spec import ModelSpec

if TYPE_CHECKING:
    from harness.model.recipe import RandomRecipe


class LatentLayout(DecoderLayout):
    """The layout of latent attention. The projection up to keys and values lies whole in front of attention; that to
    values lies behind it too, where decoding tokens need it."""

    harmless: ClassVar = {
        **dict.fromkeys(("num_nextn_predict_layers", "num_mtp_layers"), "counts further layers, which guess ahead"),
        **dict.fromkeys(("n_group", "topk_group"), "counts where the router has groups alone"),
    }

    def attention_in_sources(self, spec: ModelSpec, prefix: str) -> tuple[TensorSource, ...]:
        latent, hidden = spec.latent, spec.hidden_dim
        assert latent is not None
        module = prefix + "self_attn."
        if latent.q_rank is None:
            queries: tuple[TensorSource, ...] = (TensorSource("q", (spec.q_dim, hidden), (module + "q_proj.weight",)),)
        else:
            queries = (
                TensorSource("q_a", (latent.q_rank, hidden), (module + "q_a_proj.weight",)),
                TensorSource("q_a_norm", (latent.q_rank,), (module + "q_a_layernorm.weight",)),
                TensorSource("q_b", (spec.q_dim, latent.q_rank), (module + "q_b_proj.weight",)),
            )
        down_dim, up_dim = latent.kv_rank + latent.rope_dim, spec.num_heads * (latent.nope_dim + latent.value_dim)
        return (
            TensorSource("input_norm", (hidden,), (prefix + "input_layernorm.weight",)),
            *queries,
            TensorSource("kv_a", (down_dim, hidden), (module + "kv_a_proj_with_mqa.weight",)),
            TensorSource("kv_a_norm", (latent.kv_rank,), (module + "kv_a_layernorm.weight",)),
            TensorSource("kv_b", (up_dim, latent.kv_rank), (module + "kv_b_proj.weight",)),
        )

    def attention_out_sources(self, spec: ModelSpec, prefix: str) -> tuple[TensorSource, ...]:
        latent = spec.latent
        assert latent is not None
        of_head = latent.nope_dim + latent.value_dim
        values = TensorSlice(rows_of_each=RowsOfEach(latent.nope_dim, of_head, of_head))
        name = prefix + "self_attn.kv_b_proj.weight"
        return (
            TensorSource("v_up", (spec.o_dim, latent.kv_rank), (name,), slices=(values,)),
            TensorSource("o", (spec.hidden_dim, spec.o_dim), (prefix + "self_attn.o_proj.weight",)),
            TensorSource("post_norm", (spec.hidden_dim,), (prefix + "post_attention_layernorm.weight",)),
        )

    def router_sources(self, spec: ModelSpec, prefix: str) -> tuple[TensorSource, ...]:
        [router] = super().router_sources(spec, prefix)
        return (replace(router, dtype="float32"),)


def read_latent_dimensions(
    read: ConfigReader, name: str, dtype: str, *, num_experts: str, num_dense: int
) -> dict[str, Any]:
    """Read the entries that DeepSeek's families have in common, as fields of `ModelSpec`. `num_experts` is the other
    name under which transformers knows `n_routed_experts`. Defaults are those of transformers, as is `num_dense`: how
    many layers, the first ones, have no experts where config.json does not say it."""
    for entry, only in (("hidden_act", "silu"), ("attention_bias", False), ("moe_layer_freq", 1)):
        read.must_equal(entry, only)
    num_layers, num_heads = read.positive_int("num_hidden_layers"), read.positive_int("num_attention_heads")
    read.must_equal("num_key_value_heads", num_heads)
    latent = LatentAttention(
        kv_rank=read.positive_int("kv_lora_rank", 512),
        nope_dim=read.positive_int("qk_nope_head_dim", 128),
        rope_dim=read.positive_int("qk_rope_head_dim", 64),
        value_dim=read.positive_int("v_head_dim", 128),
        q_rank=read.optional_positive_int("q_lora_rank") if "q_lora_rank" in read.entries else 1536,
    )
    for entry, derived in (("head_dim", latent.rope_dim), ("qk_head_dim", latent.nope_dim + latent.rope_dim)):
        if read.entries.get(entry) is not None:  # transformers writes them, and goes by some of them
            read.must_equal(entry, derived)
    if latent.rope_dim % 2:
        raise bad_entry("qk_rope_head_dim", f"must be even (RoPE rotates pairs), got {latent.rope_dim}")
    vocab_size, max_positions = read.positive_int("vocab_size"), read.positive_int("max_position_embeddings")
    return {
        "name": name,
        "num_layers": num_layers,
        "hidden_dim": read.positive_int("hidden_size"),
        "num_heads": num_heads,
        "num_kv_heads": num_heads,
        "head_dim": latent.nope_dim + latent.rope_dim,
        "latent": latent,
        "vocab_size": vocab_size,
        "max_positions": max_positions,
        **read.rope(1e4, max_positions=max_positions),
        "norm_eps": read.positive_float("rms_norm_eps", 1e-6),
        "tie_embeddings": read.flag("tie_word_embeddings", default=False),
        "eos_token_id": read.eos_token_id(vocab_size),
        "dtype": checked_dtype(dtype),
        **_experts(read, num_layers, num_experts, num_dense),
    }


def _experts(read: ConfigReader, num_layers: int, num_experts: str, num_dense: int) -> dict[str, Any]:
    """Read sizes and numbers of routed and shared experts, and which layers have an ordinary MLP."""
    count = read.name_of(num_experts, "n_routed_experts")
    experts, per_token = read.positive_int(count), read.positive_int("num_experts_per_tok")
    if per_token > experts:
        raise bad_entry("num_experts_per_tok", f"must be at most {count} {experts}, got {per_token}")
    require_countable("model.path", num_layers, experts)
    num_dense = read.non_negative_int("first_k_dense_replace", num_dense)
    if num_dense >= num_layers:
        raise bad_entry("first_k_dense_replace", f"must be below num_hidden_layers {num_layers}, got {num_dense}")
    width = read.positive_int("moe_intermediate_size")
    return {
        "num_experts": experts,
        "experts_per_token": per_token,
        "expert_dim": width,
        "shared_expert_dim": read.positive_int("n_shared_experts") * width,
        "dense_layers": tuple(range(num_dense)),
        "dense_dim": read.positive_int("intermediate_size") if num_dense else 0,
    }


def read_groups(
    read: ConfigReader,
    num_experts: int,
    per_token: int,
    *,
    scored_by: int,
    groups: int | None = None,
    best: int | None = None,
) -> dict[str, Any]:
    """Read in how many groups experts lie and how many of them a token may use, as fields of `Router`. The sum over
    `scored_by` experts is a group's score; `groups` and `best` are transformers' defaults. Raises ConfigError where the
    groups cannot give a token its experts, or have one expert each."""
    num_groups, chosen = read.positive_int("n_group", groups), read.positive_int("topk_group", best)
    size, least = num_experts // num_groups, max(scored_by, 2)  # a choice of groups is told from one of experts
    if num_experts % num_groups or size < least:
        raise bad_entry(
            "n_group", f"must divide {num_experts} experts into groups of {least} or more, got {num_groups}"
        )
    if not per_token <= chosen * size or chosen > num_groups:
        raise bad_entry(
            "topk_group", f"must be at most n_group {num_groups}, with {per_token} experts or more, got {chosen}"
        )
    if num_groups == 1:
        return {}
    return {"num_groups": num_groups, "groups_per_token": chosen, "group_score_experts": scored_by}


def latent_entries(recipe: RandomRecipe) -> dict[str, Any]:
    """Return the entries of config.json that DeepSeek's families have in common."""
    latent, router = recipe.latent, recipe.router
    require(latent is not None, "latent", f"missing; the family {recipe.family} caches latents")
    assert latent is not None
    entries = decoder_entries(recipe)
    del entries["head_dim"]  # transformers derives it, as that of RoPE
    return {
        **entries,
        "kv_lora_rank": latent.kv_rank,
        "q_lora_rank": latent.q_rank,
        "qk_nope_head_dim": latent.nope_dim,
        "qk_rope_head_dim": latent.rope_dim,
        "v_head_dim": latent.value_dim,
        "n_routed_experts": recipe.num_experts,
        "moe_intermediate_size": recipe.expert_dim,
        "n_shared_experts": recipe.shared_expert_dim // recipe.expert_dim,
        "first_k_dense_replace": len(recipe.dense_layers),
        "intermediate_size": recipe.dense_dim or recipe.expert_dim,
        "routed_scaling_factor": router.scale,
        "norm_topk_prob": router.renormalise,
        "n_group": router.num_groups,
        "topk_group": router.groups_per_token,
    }
