"""A model's dimensions, and what follows from them: bytes and FLOPs. Torch-free, so planning takes microseconds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Dtype = Literal["float32", "bfloat16"]
DTYPE_BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Dimensions of a decoder-only MoE model. Papers' symbols: h hidden_dim, h_i expert_dim, N_e, N_k, s group."""

    name: str
    family: str  # module under harness/model/families, equal to Hugging Face's `model_type`
    num_layers: int
    hidden_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_experts: int
    experts_per_token: int
    expert_dim: int
    vocab_size: int
    max_positions: int
    rope_theta: float
    norm_eps: float
    sliding_window: int | None = None
    tie_embeddings: bool = False
    eos_token_id: int | None = None
    dtype: Dtype = "bfloat16"

    @property
    def dtype_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def q_dim(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def group_size(self) -> int:
        """Query heads per KV head (the papers' s)."""
        return self.num_heads // self.num_kv_heads

    @property
    def kv_bytes_per_token_layer(self) -> int:
        return 2 * self.kv_dim * self.dtype_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        return self.num_layers * self.kv_bytes_per_token_layer

    @property
    def expert_params(self) -> int:
        """Gate, up and down projections of one expert."""
        return 3 * self.hidden_dim * self.expert_dim

    @property
    def attention_params(self) -> int:
        """Q, K, V and O projections of one layer."""
        return self.hidden_dim * (2 * self.q_dim + 2 * self.kv_dim)

    @property
    def layer_params(self) -> int:
        """One layer: attention, router, experts and the two norms."""
        router_and_norms = self.hidden_dim * self.num_experts + 2 * self.hidden_dim
        return self.attention_params + router_and_norms + self.num_experts * self.expert_params

    @property
    def layer_bytes(self) -> int:
        return self.layer_params * self.dtype_bytes

    @property
    def num_params(self) -> int:
        embeddings = self.vocab_size * self.hidden_dim * (1 if self.tie_embeddings else 2)
        return self.num_layers * self.layer_params + embeddings + self.hidden_dim

    @property
    def model_bytes(self) -> int:
        return self.num_params * self.dtype_bytes

    @property
    def flops_per_token_layer(self) -> int:
        """GEMM FLOPs of one token in one layer (2 per multiply-add), attention scores apart."""
        active = self.attention_params + self.hidden_dim * self.num_experts
        return 2 * (active + self.experts_per_token * self.expert_params)
