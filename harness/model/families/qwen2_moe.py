"""Qwen2-MoE has attention with biases, SwiGLU experts, and a shared expert behind a sigmoid gate. Reproduces
transformers' `modeling_qwen2_moe` (float32: the same tokens)."""

from __future__ import annotations

from harness.model.families.decoder import Decoder
from harness.model.families.qwen2_moe_layout import Qwen2MoeLayout


class Qwen2Moe(Qwen2MoeLayout, Decoder):
    pass


FAMILY = Qwen2Moe()
