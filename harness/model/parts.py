"""What a model consists of: parameters, bytes and FLOPs by part. Torch-free.

Matrices multiply tokens and may be stored in a narrow format; vectors are norms, biases, sinks. FLOPs count two per
multiply-add of the matrices; attention's products with the KV cache depend on the context and are counted apart
(`ModelSpec.decode_pair_flops`, `prefill_pair_flops`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING

from harness.config import require

if TYPE_CHECKING:
    from harness.model.spec import ModelSpec

EMBEDDING, HEAD, FINAL_NORM = "embedding", "head", "final_norm"
ATTENTION, NORMS, ROUTER, EXPERT = "attention", "norms", "router", "expert"
SHARED_EXPERTS, DENSE_MLP = "shared_experts", "dense_mlp"
PART_NAMES = (EMBEDDING, ATTENTION, NORMS, ROUTER, EXPERT, SHARED_EXPERTS, DENSE_MLP, FINAL_NORM, HEAD)


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One kind of part: its size, how often the model has it, and how often a token passes one."""

    name: str
    matrix_params: int
    vector_params: int
    count: int
    passes: int
    matrix_bytes: float  # of one of them
    vector_bytes: int  # of one of them

    @property
    def params(self) -> int:
        return self.matrix_params + self.vector_params

    @property
    def nbytes(self) -> int:
        """Of one of them, whole bytes."""
        return math.ceil(self.matrix_bytes) + self.vector_bytes

    @property
    def total_params(self) -> int:
        return self.count * self.params

    @property
    def total_bytes(self) -> int:
        return self.count * self.nbytes

    @property
    def active_params(self) -> int:
        return self.passes * self.params

    @property
    def flops_per_token(self) -> int:
        """Of all that a token passes."""
        return 2 * self.passes * self.matrix_params


@lru_cache(maxsize=256)
def parts(spec: ModelSpec) -> Mapping[str, Part]:
    """Every part of `PART_NAMES`, in that order; what the model lacks has count 0.

    The embedding is a lookup: no token passes it. A tied head is passed by every token and stored with the embedding.
    Raises ConfigError where `spec.weights` names an unknown part.
    """
    weights, layers, moe_layers = spec.weights, spec.num_layers, spec.num_moe_layers
    unknown = set(weights.parts) - set(PART_NAMES) if weights else set()
    require(not unknown, "weights.parts", f"must be among {', '.join(PART_NAMES)}, got {', '.join(sorted(unknown))}")
    embedding = spec.vocab_size * spec.hidden_dim
    shared_layers = moe_layers if spec.shared_expert_dim else 0
    rows = (  # name, matrix and vector parameters, count, passes of a token
        (EMBEDDING, embedding, 0, 1, 0),
        (ATTENTION, spec.attention_params, _attention_vectors(spec), layers, layers),
        (NORMS, 0, 2 * spec.hidden_dim, layers, layers),
        (ROUTER, *_router(spec), moe_layers, moe_layers),
        (EXPERT, *_expert(spec), moe_layers * spec.num_experts, moe_layers * spec.experts_per_token),
        (SHARED_EXPERTS, spec.shared_expert_params, 0, shared_layers, shared_layers),
        (DENSE_MLP, 3 * spec.hidden_dim * spec.dense_dim, 0, len(spec.dense_layers), len(spec.dense_layers)),
        (FINAL_NORM, 0, spec.hidden_dim, 1, 1),
        (HEAD, embedding, 0, 0 if spec.tie_embeddings else 1, 1),
    )
    table = {}
    for name, matrix, vector, count, passes in rows:
        width = weights.bytes_per_param if weights and name in weights.parts else spec.dtype_bytes
        table[name] = Part(
            name=name,
            matrix_params=matrix,
            vector_params=vector,
            count=count,
            passes=passes,
            matrix_bytes=matrix * width,
            vector_bytes=vector * spec.dtype_bytes,
        )
    return MappingProxyType(table)


def _attention_vectors(spec: ModelSpec) -> int:
    """Biases, norms of queries and keys, norms of the latents, and sinks of one layer."""
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


def _router(spec: ModelSpec) -> tuple[int, int]:
    return spec.hidden_dim * spec.num_experts, spec.num_experts * (spec.router_bias + spec.correction_bias)


def _expert(spec: ModelSpec) -> tuple[int, int]:
    return spec.expert_params, (2 * spec.expert_dim + spec.hidden_dim) if spec.expert_bias else 0
