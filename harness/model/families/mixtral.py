"""Mixtral has grouped-query attention with RoPE, and SwiGLU experts chosen by a softmax router. Reproduces
transformers' `modeling_mixtral` (float32: the same tokens)."""

from __future__ import annotations

from harness.model.families.decoder import Decoder
from harness.model.families.mixtral_layout import MixtralLayout


class Mixtral(MixtralLayout, Decoder):
    pass


FAMILY = Mixtral()
