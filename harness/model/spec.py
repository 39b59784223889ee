"""Hold a model's dimensions, and derive bytes and FLOPs from them. Torch-free, so planning takes microseconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal, NamedTuple, get_args

from harness.model.components import (
    ATTENTION,
    DENSE_MLP,
    EMBEDDING,
    EXPERT,
    FINAL_NORM,
    HEAD,
    NORMS,
    ROUTER,
    SHARED_EXPERTS,
    Component,
    Counted,
    sized,
)
from harness.model.dimensions import Dimensions, SpecConfig

Dtype = Literal["float32", "bfloat16", "float16"]
DTYPES = get_args(Dtype)
DTYPE_NAMES = f"{', '.join(DTYPES[:-1])} or {DTYPES[-1]}"
DTYPE_BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}


class KvPiece(NamedTuple):
    """Describes one piece of what the KV cache holds of a token in a layer: `num_heads` rows of `width` numbers.

    The activation buffers of the new tokens' rows have its name.
    """

    name: str
    num_heads: int
    width: int

    @property
    def dim(self) -> int:
        return self.num_heads * self.width


@dataclass(frozen=True, kw_only=True)
class ModelSpec(Dimensions):
    """A decoder-only MoE model: `Dimensions` (see there), a name and the dtype of activations, KV cache and weights
    (those apart that `weights` lists). s is the papers' symbol for group_size."""

    name: str
    dtype: Dtype = "bfloat16"
    expand_prefill: bool | None = None  # see `expands_prefill`; None: by FLOPs

    @classmethod
    def from_config(cls, spec: SpecConfig, name: str, dtype: Dtype | None) -> ModelSpec:
        """Return the model of `model.spec`; without a dtype as published, in bfloat16."""
        return cls(name=name, dtype=dtype or "bfloat16", **spec.dimensions())

    @cached_property
    def dtype_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @cached_property
    def q_dim(self) -> int:
        return self.num_heads * self.head_dim

    @cached_property
    def kv_dim(self) -> int:
        """The dimension of all heads' keys."""
        return self.num_kv_heads * self.head_dim

    @cached_property
    def value_dim(self) -> int:
        """The dimension of one head's values and attention results."""
        return self.latent.value_dim if self.latent else self.head_dim

    @cached_property
    def v_dim(self) -> int:
        """The dimension of all heads' values."""
        return self.num_kv_heads * self.value_dim

    @cached_property
    def o_dim(self) -> int:
        """The dimension of all heads' attention results."""
        return self.num_heads * self.value_dim

    @cached_property
    def cached_q_dim(self) -> int:
        """The dimension of all heads' queries for attention over the cache: on the latent where there is one."""
        return self.num_heads * (self.latent.kv_rank + self.latent.rope_dim) if self.latent else self.q_dim

    @cached_property
    def cached_o_dim(self) -> int:
        """The dimension of all heads' results of attention over the cache."""
        return self.num_heads * self.latent.kv_rank if self.latent else self.o_dim

    @cached_property
    def q_row_dim(self) -> int:
        """The dimension of a token's row of queries, whether it attends to keys and values of heads or to the cache."""
        return max(self.q_dim, self.cached_q_dim)

    @cached_property
    def o_row_dim(self) -> int:
        """The dimension of a token's row of attention results, by which way ever they are computed."""
        return max(self.o_dim, self.cached_o_dim)

    @cached_property
    def prompt_row_dim(self) -> int:
        """The numbers that a prompt's attention reads and writes for each token: query, key, value and result."""
        if self.expands_prefill:
            return self.q_dim + self.kv_dim + self.v_dim + self.o_dim
        return self.cached_q_dim + self.kv_pieces[0].dim + self.cached_o_dim

    @cached_property
    def expands_prefill(self) -> bool:
        """True if prompts attend to keys and values of heads, which their own latents are expanded to.

        The other way is attention to the latents themselves, as in decode. A token's projections cost the same in both:
        each up projection is applied once, to latents or to queries and results. So the way that takes fewer FLOPs for
        a pair of tokens takes fewer at any length, unless `expand_prefill` says which. Without latents there are keys
        and values only.
        """
        if self.latent is None or self.expand_prefill is None:
            return self.latent is None or self.expanded_pair_flops <= self.decode_pair_flops
        return self.expand_prefill

    @cached_property
    def kv_pieces(self) -> tuple[KvPiece, ...]:
        """The pieces cached of a token in a layer: keys and values, or the latent with the RoPE key of all heads."""
        if self.latent:
            return (KvPiece("latent", 1, self.latent.kv_rank + self.latent.rope_dim),)
        return tuple(KvPiece(name, self.num_kv_heads, self.head_dim) for name in ("k", "v"))

    @cached_property
    def group_size(self) -> int:
        """The number of query heads per KV head (the papers' s)."""
        return self.num_heads // self.num_kv_heads

    @cached_property
    def moe_layers(self) -> tuple[int, ...]:
        """The layers that have a router and experts, ascending."""
        return tuple(layer for layer in range(self.num_layers) if layer not in self.dense_layers)

    @cached_property
    def num_moe_layers(self) -> int:
        return self.num_layers - len(self.dense_layers)

    @cached_property
    def kv_bytes_per_token_layer(self) -> int:
        """The bytes of all `kv_pieces` of one token in one layer."""
        return sum(piece.dim for piece in self.kv_pieces) * self.dtype_bytes

    @cached_property
    def kv_bytes_per_token(self) -> int:
        return self.num_layers * self.kv_bytes_per_token_layer

    @cached_property
    def expert_params(self) -> int:
        """The parameters of one expert's gate, up and down projections."""
        return 3 * self.hidden_dim * self.expert_dim

    @cached_property
    def shared_expert_params(self) -> int:
        """The parameters of one layer's shared experts with their gate."""
        return 3 * self.hidden_dim * self.shared_expert_dim + (self.hidden_dim if self.shared_expert_gate else 0)

    @cached_property
    def attention_params(self) -> int:
        """The parameters of one layer's projections: Q, K, V and O; with latent attention those down to the latents and
        up from them."""
        latent, hidden = self.latent, self.hidden_dim
        if latent is None:
            return hidden * (2 * self.q_dim + 2 * self.kv_dim)
        q = latent.q_rank * (hidden + self.q_dim) if latent.q_rank else hidden * self.q_dim
        kv_up = latent.kv_rank * self.num_heads * (latent.nope_dim + latent.value_dim)
        return q + hidden * (latent.kv_rank + latent.rope_dim) + kv_up + self.o_dim * hidden

    @cached_property
    def attention_in_params(self) -> int:
        """The parameters of the matrices in front of attention: all projections except the output's."""
        return self.attention_params - self.attention_out_params

    @cached_property
    def attention_out_params(self) -> int:
        return self.o_dim * self.hidden_dim

    @cached_property
    def value_up_params(self) -> int:
        """The parameters of the projection from latents to values, which is used in front of attention or behind it.
        It is stored in both places."""
        return self.o_dim * self.latent.kv_rank if self.latent else 0

    @cached_property
    def value_up_bytes(self) -> int:
        """The bytes that the second copy of `value_up_params` takes in one layer."""
        attention = self.components[ATTENTION]
        return round(attention.matrix_bytes * self.value_up_params / attention.matrix_params)

    def is_dense(self, layer: int) -> bool:
        """Return whether the layer has an ordinary MLP instead of router and experts."""
        return layer in self.dense_layers

    def common_mlp_params(self, layer: int) -> int:
        """Return the parameters of the matrices behind attention that every token passes: the router and shared
        experts, or the dense MLP."""
        if self.is_dense(layer):
            return 3 * self.hidden_dim * self.dense_dim
        return self.hidden_dim * self.num_experts + self.shared_expert_params

    def has_common_mlp(self, layer: int) -> bool:
        """Return whether the layer has an MLP that every token passes: shared experts, or a dense MLP."""
        return self.is_dense(layer) or self.shared_expert_dim > 0

    @cached_property
    def components(self) -> Mapping[str, Component]:
        """Parameters, bytes and FLOPs by the names of `harness.model.components`."""
        return _components(self)

    @cached_property
    def layer_bytes(self) -> int:
        """The bytes of one MoE layer: attention, norms, router, experts and shared experts, as the harness stores
        them."""
        names = (ATTENTION, NORMS, ROUTER, SHARED_EXPERTS)
        once = sum(self.components[name].nbytes for name in names) + self.value_up_bytes
        return once + self.num_experts * self.components[EXPERT].nbytes

    @cached_property
    def num_params(self) -> int:
        return sum(part.total_params for part in self.components.values())

    @cached_property
    def active_params(self) -> int:
        """The parameters that one token passes, head included; the embedding is a lookup."""
        return sum(part.active_params for part in self.components.values())

    @cached_property
    def model_bytes(self) -> int:
        return sum(part.total_bytes for part in self.components.values())

    @cached_property
    def flops_per_token(self) -> int:
        """The GEMM FLOPs of one token through all layers and the head, without attention scores."""
        return sum(part.flops_per_token for part in self.components.values())

    @cached_property
    def flops_per_token_layer(self) -> int:
        """The GEMM FLOPs of one token in one MoE layer (2 per multiply-add), without attention scores."""
        active = self.attention_params + self.hidden_dim * self.num_experts + self.shared_expert_params
        return 2 * (active + self.experts_per_token * self.expert_params)

    @cached_property
    def prefill_pair_flops(self) -> int:
        """The FLOPs of one layer's attention in a prompt, for each pair of a query and a token it sees."""
        return self.expanded_pair_flops if self.expands_prefill else self.decode_pair_flops

    @cached_property
    def expanded_pair_flops(self) -> int:
        """The FLOPs of attention on keys and values of all heads, for each pair of a query and a token it sees."""
        return 2 * (self.q_dim + self.o_dim)

    @cached_property
    def decode_pair_flops(self) -> int:
        """The FLOPs of one layer's decode attention for each pair of a query and a token it sees, on the KV cache as
        stored. With latent attention every head works on the latent itself, and its up projections are absorbed into
        query and output; these then cost what `attention_params` already counts."""
        if self.latent is None:
            return self.expanded_pair_flops
        return 2 * self.num_heads * (2 * self.latent.kv_rank + self.latent.rope_dim)

    @cached_property
    def attention_scale(self) -> float:
        """The factor by which scores are multiplied before the softmax."""
        more = self.yarn.score_scale if self.yarn and self.latent else 1.0
        return self.head_dim**-0.5 * more * more

    def window(self, layer: int) -> int | None:
        """Return how many tokens a query sees in `layer`, its own included; None: all."""
        return self.sliding_window if self.sliding_layers == "all" or layer % 2 == 0 else None

    def seen_tokens(self, layer: int, context_len: int) -> int:
        """Return how many tokens of the context a query sees in `layer`, its own included."""
        return min(context_len, self.window(layer) or context_len)


@lru_cache(maxsize=256)
def _components(spec: ModelSpec) -> Mapping[str, Component]:
    """Return every component of `COMPONENT_NAMES`, in that order; what the model lacks has count 0.

    The embedding is a lookup: no token passes it. A tied head is passed by every token and stored with the embedding.
    Raises ConfigError where `spec.weights` names an unknown component.
    """
    layers, moe_layers, dense_layers = spec.num_layers, spec.num_moe_layers, len(spec.dense_layers)
    embedding, hidden = spec.vocab_size * spec.hidden_dim, spec.hidden_dim
    shared_layers = moe_layers if spec.shared_expert_dim else 0
    router = hidden * spec.num_experts, spec.num_experts * (spec.router_bias + spec.correction_bias)
    expert_bias = (2 * spec.expert_dim + hidden) if spec.expert_bias else 0
    kinds = (
        Counted(EMBEDDING, embedding, 0, 1, 0),
        Counted(ATTENTION, spec.attention_params, _attention_vectors(spec), layers, layers),
        Counted(NORMS, 0, 2 * hidden, layers, layers),
        Counted(ROUTER, *router, moe_layers, moe_layers),
        Counted(
            EXPERT, spec.expert_params, expert_bias,
            moe_layers * spec.num_experts, moe_layers * spec.experts_per_token,
        ),
        Counted(SHARED_EXPERTS, spec.shared_expert_params, 0, shared_layers, shared_layers),
        Counted(DENSE_MLP, 3 * hidden * spec.dense_dim, 0, dense_layers, dense_layers),
        Counted(FINAL_NORM, 0, hidden, 1, 1),
        Counted(HEAD, embedding, 0, 0 if spec.tie_embeddings else 1, 1),
    )  # fmt: skip
    return sized(kinds, spec.weights, spec.dtype_bytes)


def _attention_vectors(spec: ModelSpec) -> int:
    """Count biases, norms of queries and keys, norms of the latents, and sinks of one layer."""
    total = 0
    if spec.qkv_bias:
        total += spec.q_dim + 2 * spec.kv_dim
    if spec.o_bias:
        total += spec.hidden_dim
    if spec.qk_norm:
        total += 2 * spec.head_dim if spec.qk_norm == "head" else spec.q_dim + spec.kv_dim
    if spec.latent:
        total += spec.latent.kv_rank + (spec.latent.q_rank or 0)
    return total + (spec.num_heads if spec.attention_sinks else 0)
