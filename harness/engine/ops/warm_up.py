"""Do what is done at the first use of a kernel before the first pass: compiling, loading, making handles, starting
threads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

import kernels
from harness.engine.ops.views import expert_weights, weights
from harness.machine.base import Context, Op, Work
from harness.memory.placed import PlacedPart
from harness.memory.weights import Resident
from harness.model.gpu_kernels import warm_up
from harness.model.spec import ModelSpec

_ROWS = (1, 64, 1024)  # for which cuBLAS takes other kernels, each of which CUDA loads at its first launch
_HEAD_ROWS = (1, 64)  # more would take hundreds of megabytes for large vocabularies


class StartThreads(Op):
    """Starts the kernels' threads of the host lane that runs it, by a copy of few bytes."""

    kind: ClassVar[str] = "start threads"

    def work(self) -> Work:
        """Return no work: this is set-up, which no cost model times."""
        return Work()

    def run(self, ctx: Context, packet: int) -> None:
        few = torch.zeros(2, 64, dtype=torch.uint8)
        kernels.stream_copy(few[0], few[1], num_threads=ctx.num_threads())


class ViewWeights(Op):
    """Makes torch's views of weights that stay on the device, as an op does that uses a part for the first time.

    Those of a layer with 128 experts take longer than a decode pass over it.
    """

    kind: ClassVar[str] = "view weights"

    def __init__(self, family: Any, spec: ModelSpec, parts: Sequence[PlacedPart]) -> None:
        self.family, self.spec, self.parts = family, spec, parts

    def work(self) -> Work:
        """Return no work: this is set-up, which no cost model times."""
        return Work()

    def run(self, ctx: Context, packet: int) -> None:
        for part in self.parts:
            views = weights(ctx, part)
            on_cpu = all(each.is_cpu for each in views.values())
            if part.layout.expert is not None and on_cpu and self.spec.dtype != "float32":
                expert_weights(ctx, self.family, self.spec, part).require_in_place()


class WarmUp(Op):
    """Runs, on the gpu lane, every GPU kernel in every form that a pass may ask for, and some tokens through the
    family's own math.

    After that the libraries behind it have their handles and workspaces and have loaded kernels for few rows and many,
    and the tables of rotary angles are there.
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
        self._tokens(embedding, weights(ctx, self.head), device)
        if device.type == "cuda":
            torch.cuda.empty_cache()  # memory is planned from here on: torch must not keep any of this

    def _tokens(self, embedding: dict[str, Any], head: dict[str, Any], device: Any) -> None:
        spec, family, last = self.spec, self.family, self.spec.num_layers - 1
        parts = {part.name: part for part in family.layer_parts(spec, last)}

        def zeros(name: str) -> dict[str, Any]:
            tensors = parts[name].tensors
            return {t.name: torch.zeros(t.shape, dtype=getattr(torch, t.dtype), device=device) for t in tensors}

        front, behind = zeros("attention_in"), zeros("attention_out")
        for rows in _ROWS:
            tokens = torch.zeros(rows, dtype=torch.int64, device=device)
            hidden = family.embed(spec, embedding, tokens)
            if spec.latent is None:
                family.attention_in(spec, front, hidden, tokens, last)
            else:
                for num_expanded in (0, rows):
                    family.latents_in(spec, front, hidden, tokens, num_expanded, last)
                family.from_latents(spec, behind, hidden.new_zeros(rows, spec.cached_o_dim), last)
            projected = family.output_projection(spec, behind, hidden.new_zeros(rows, spec.o_dim), last)
            family.after_attention(spec, behind, projected, hidden, last)
            if rows in _HEAD_ROWS:
                family.head(spec, head, hidden).argmax(dim=-1)
