"""OLMoE has attention with norms over all query and all key heads, and SwiGLU experts. Reproduces transformers'
`modeling_olmoe` (float32: the same tokens)."""

from __future__ import annotations

from harness.model.families.decoder import Decoder
from harness.model.families.olmoe_layout import OlmoeLayout


class Olmoe(OlmoeLayout, Decoder):
    pass


FAMILY = Olmoe()
