"""Mixtral: grouped-query attention with RoPE, and SwiGLU experts chosen by a softmax router.

Reproduces transformers' `modeling_mixtral` (float32: the same tokens). `families/__init__.py` states each contract.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from harness.model import functional
from harness.model.families.mixtral_layout import (
    config_from_recipe,
    embedding_part,
    head_part,
    layer_parts,
    spec_from_config,
)
from harness.model.linear import linear
from harness.model.spec import ModelSpec
from kernels import triton as gpu

__all__ = [
    "after_attention",
    "attention_in",
    "attention_out",
    "config_from_recipe",
    "decode_attention",
    "embed",
    "embedding_part",
    "expert",
    "expert_matrices",
    "head",
    "head_part",
    "layer_parts",
    "output_projection",
    "prefill_attention",
    "reference_routers",
    "spec_from_config",
]

Weights = Mapping[str, Tensor]


def embed(spec: ModelSpec, w: Weights, token_ids: Tensor) -> Tensor:
    return F.embedding(token_ids, w["embed"])


def attention_in(spec: ModelSpec, w: Weights, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    num_tokens = hidden.shape[0]
    qkv = linear(functional.rms_norm(hidden, w["input_norm"], spec.norm_eps), w["qkv"])
    q, k, v = qkv.split((spec.q_dim, spec.kv_dim, spec.kv_dim), dim=-1)
    tables = functional.rope_tables(spec.rope_theta, spec.head_dim, spec.max_positions, hidden.dtype, hidden.device)
    cos, sin = (table[positions] for table in tables)
    return (
        functional.apply_rope(q.view(num_tokens, spec.num_heads, spec.head_dim), cos, sin),
        functional.apply_rope(k.view(num_tokens, spec.num_kv_heads, spec.head_dim), cos, sin),
        v.reshape(num_tokens, spec.num_kv_heads, spec.head_dim).contiguous(),
    )


def prefill_attention(spec: ModelSpec, q: Tensor, k: Tensor, v: Tensor, seq_lens: Sequence[int]) -> Tensor:
    return functional.causal_attention(q, k, v, seq_lens, spec.sliding_window)


def decode_attention(spec: ModelSpec, q: Tensor, k: Tensor, v: Tensor, context_len: int) -> Tensor:
    return functional.decode_attention(q, k, v, context_len, spec.sliding_window)


def attention_out(spec: ModelSpec, w: Weights, attn: Tensor, residual: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return after_attention(spec, w, output_projection(spec, w, attn), residual)


def output_projection(spec: ModelSpec, w: Weights, attn: Tensor) -> Tensor:
    return linear(attn, w["o"])


def after_attention(
    spec: ModelSpec, w: Weights, projected: Tensor, residual: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    residual_new = residual + projected
    normed = functional.rms_norm(residual_new, w["post_norm"], spec.norm_eps)
    logits = linear(normed, w["router"])
    if gpu.serves(logits):
        return residual_new, normed, *gpu.choose_experts(logits, spec.experts_per_token)
    chosen, expert_ids = logits.float().softmax(dim=-1).topk(spec.experts_per_token, dim=-1)
    return residual_new, normed, expert_ids, chosen / chosen.sum(dim=-1, keepdim=True)


def expert(spec: ModelSpec, w: Weights, x: Tensor) -> Tensor:
    return functional.swiglu(x, w["gate_up"], w["down"])


def expert_matrices(spec: ModelSpec, w: Weights) -> gpu.ExpertMatrices:
    gate, up = w["gate_up"].chunk(2)
    return gpu.ExpertMatrices(gate=gate, up=up, down=w["down"])


def head(spec: ModelSpec, w: Weights, hidden: Tensor) -> Tensor:
    return linear(functional.rms_norm(hidden, w["final_norm"], spec.norm_eps), w["lm_head"]).float()


def reference_routers(model: nn.Module) -> list[nn.Module]:
    return [layer.mlp.gate for layer in model.model.layers]  # type: ignore[union-attr]
