"""Do what a GPU does at its first use of a kernel, before the first pass: compiling, loading, making handles."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from harness.engine.ops.views import weights
from harness.machine.base import Context, Op, Work
from harness.memory.weights import Resident
from harness.model.gpu_kernels import warm_up
from harness.model.spec import ModelSpec


class WarmUp(Op):
    """Runs, on the gpu lane, every GPU kernel in every form that a pass may ask for, and one token through the family's
    own math.

    After that the libraries behind it have their handles and workspaces, and the tables of rotary angles are there.
    `kv_block_size` is that of a paged KV cache, should there be one on the device. A layer's weights are zeros.
    """

    kind: ClassVar[str] = "warm up"

    def __init__(self, family: Any, spec: ModelSpec, resident: Resident, kv_block_size: int) -> None:
        self.family, self.spec, self.kv_block_size = family, spec, kv_block_size
        self.embedding, self.head = resident.embedding, resident.head
        self.reads = (*self.embedding.keys, *self.head.keys)

    def work(self) -> Work:
        """Return no work: this is set-up, which no cost model times."""
        return Work()

    def run(self, ctx: Context, packet: int) -> None:
        embedding = weights(ctx, self.embedding)
        device = next(iter(embedding.values())).device
        warm_up(self.spec, device, self.kv_block_size)
        self._one_token(embedding, weights(ctx, self.head), device)
        if device.type == "cuda":
            torch.cuda.empty_cache()  # memory is planned from here on: torch must not keep any of this

    def _one_token(self, embedding: dict[str, Any], head: dict[str, Any], device: Any) -> None:
        spec, family = self.spec, self.family
        parts = {part.name: part for part in family.layer_parts(spec, spec.num_layers - 1)}

        def zeros(name: str) -> dict[str, Any]:
            tensors = parts[name].tensors
            return {t.name: torch.zeros(t.shape, dtype=getattr(torch, t.dtype), device=device) for t in tensors}

        token = torch.zeros(1, dtype=torch.int64, device=device)
        hidden, behind, last = family.embed(spec, embedding, token), zeros("attention_out"), spec.num_layers - 1
        if spec.latent is None:
            family.attention_in(spec, zeros("attention_in"), hidden, token, last)
        else:
            for num_expanded in (0, 1):
                family.latents_in(spec, zeros("attention_in"), hidden, token, num_expanded, last)
            family.from_latents(spec, behind, hidden.new_zeros(1, spec.cached_o_dim), last)
        projected = family.output_projection(spec, behind, hidden.new_zeros(1, spec.o_dim), last)
        family.after_attention(spec, behind, projected, hidden, last)
        family.head(spec, head, hidden).argmax(dim=-1)
