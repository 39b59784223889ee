"""DBRX has layer norms without biases, clipped queries, keys and values, and SwiGLU experts. Reproduces transformers'
`modeling_dbrx` (float32: the same tokens)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from harness.model.families.dbrx_layout import DbrxLayout
from harness.model.families.decoder import Decoder
from harness.model.spec import ModelSpec


class Dbrx(DbrxLayout, Decoder):
    def norm(self, spec: ModelSpec, x: Tensor, weight: Tensor) -> Tensor:
        return F.layer_norm(x, (spec.hidden_dim,), weight, eps=spec.norm_eps)

    def reference_routers(self, spec: ModelSpec, model: nn.Module) -> list[nn.Module]:
        return [model.transformer.blocks[layer].ffn for layer in spec.moe_layers]  # type: ignore[union-attr, index]


FAMILY = Dbrx()
