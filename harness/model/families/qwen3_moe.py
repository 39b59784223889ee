"""Qwen3-MoE has grouped-query attention with norms over each query and key head, and SwiGLU experts. Reproduces
transformers' `modeling_qwen3_moe` (float32: the same tokens)."""

from __future__ import annotations

from harness.model.families.decoder import Decoder
from harness.model.families.qwen3_moe_layout import Qwen3MoeLayout


class Qwen3Moe(Qwen3MoeLayout, Decoder):
    pass


FAMILY = Qwen3Moe()
