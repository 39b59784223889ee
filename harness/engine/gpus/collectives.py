"""Exchange results between several GPUs.

GPUs that share a layer compute partial results and their sums instead of AttentionOut and Combine; GPUs that share out
the layers hand hidden states on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from harness.engine.activations import Activations
from harness.engine.batch import MicroBatch
from harness.engine.ops.attention_rows import attended, row_features, value_up_flops
from harness.engine.ops.compute import BehindAttention
from harness.engine.ops.data import MicroBatchOp
from harness.engine.ops.views import keep, rows, weights
from harness.machine.base import Context, Work
from harness.memory.placed import PlacedPart
from harness.model.spec import ModelSpec


class OutputProjection(BehindAttention):
    """Computes this GPU's heads' part of the output projection: a partial sum. It goes to `moe_out` (float32), which is
    free before the experts."""

    kind: ClassVar[str] = "output projection"

    def __init__(
        self, family: Any, spec: ModelSpec, batch: MicroBatch, acts: Activations, part: PlacedPart, layer: int
    ) -> None:
        super().__init__(family, spec, batch, acts, (part,), layer)
        self.reads, self.writes = (*acts.attention_keys, *self.weight_keys), (acts.moe_out,)

    def work(self) -> Work:
        spec, n = self.spec, self.batch.num_tokens
        moved = n * (spec.o_dim * spec.dtype_bytes + spec.hidden_dim * 4)
        flops = 2 * n * spec.attention_out_params + value_up_flops(spec, self.batch)
        return Work(flops=flops, device_bytes=_share_bytes(self, of_projection=True) + moved)

    def cost_features(self) -> tuple[float, ...]:
        return row_features(self.spec, self.batch)

    def run(self, ctx: Context, packet: int) -> None:
        spec, n = self.spec, self.batch.num_tokens
        out, w = rows(ctx, self.acts.moe_out, n, spec.hidden_dim, "float32"), weights(ctx, self.parts[0])
        out.copy_(self.family.output_projection(spec, w, attended(ctx, self, w), self.layer))


class AfterAttention(BehindAttention):
    """Computes residual, norm and router after the summed output projection, which is in `normed`: the same on every
    GPU. Shared experts, or the MLP of a dense layer, are part of it; each GPU computes its share of them."""

    kind: ClassVar[str] = "after attention"

    def __init__(
        self, family: Any, spec: ModelSpec, batch: MicroBatch, acts: Activations, part: PlacedPart, layer: int
    ) -> None:
        super().__init__(family, spec, batch, acts, (part,), layer)
        self.reads = (acts.normed, acts.hidden, *self.weight_keys)
        self.writes = (acts.hidden, acts.normed, acts.expert_ids, acts.expert_weights, acts.moe_out)

    def work(self) -> Work:
        assert self.layer is not None
        spec, n = self.spec, self.batch.num_tokens
        moved = n * spec.hidden_dim * (4 * spec.dtype_bytes + 4)
        flops = 2 * n * spec.common_mlp_params(self.layer)
        return Work(flops=flops, device_bytes=_share_bytes(self, of_projection=False) + moved)

    def cost_features(self) -> tuple[float, ...]:
        return (float(self.batch.num_tokens),)

    def run(self, ctx: Context, packet: int) -> None:
        spec, acts, n = self.spec, self.acts, self.batch.num_tokens
        hidden = rows(ctx, acts.hidden, n, spec.hidden_dim, spec.dtype)
        normed = rows(ctx, acts.normed, n, spec.hidden_dim, spec.dtype)
        keep(ctx, self, self.family.after_attention(spec, weights(ctx, self.parts[0]), normed, hidden, self.layer))


def _share_bytes(op: OutputProjection | AfterAttention, *, of_projection: bool) -> float:
    """Return the bytes of weights that an op reads of the part that both ops use, in proportion to the matrices it
    multiplies with."""
    assert op.layer is not None
    projection = op.spec.attention_out_params + op.spec.value_up_params
    others = op.spec.common_mlp_params(op.layer)
    return op.weight_bytes() * (projection if of_projection else others) / (projection + others)


class SendHidden(MicroBatchOp):
    """Sends hidden states to the GPU that has the next layers (pipeline parallelism)."""

    kind: ClassVar[str] = "send hidden"

    def __init__(self, spec: ModelSpec, batch: MicroBatch, acts: Activations, layer: int, to: Activations) -> None:
        super().__init__(spec, batch, acts, layer)
        self.source, self.target = acts.hidden, to.hidden
        self.reads, self.writes = (self.source,), (self.target,)

    def work(self) -> Work:
        nbytes = self.batch.num_tokens * self.spec.hidden_dim * self.spec.dtype_bytes
        return Work(device_bytes=nbytes, link_bytes=nbytes)

    def cost_features(self) -> tuple[float, ...]:
        return (float(self.batch.num_tokens),)

    def run(self, ctx: Context, packet: int) -> None:
        spec, n = self.spec, self.batch.num_tokens
        source = rows(ctx, self.source, n, spec.hidden_dim, spec.dtype)
        rows(ctx, self.target, n, spec.hidden_dim, spec.dtype).copy_(source)


class AllReduce(MicroBatchOp):
    """One GPU's member of a collective. It writes the sum of all GPUs' partial results in `moe_out` to this GPU's
    `normed`, or adds it to its `hidden`.

    Partial results cross the link in the model's dtype; they are added in float32 in the order of ranks, so that all
    GPUs get the same bits. Members are tied by their keys: each reads what every GPU wrote.
    """

    kind: ClassVar[str] = "all-reduce"

    def __init__(
        self,
        spec: ModelSpec,
        batch: MicroBatch,
        acts: Activations,
        layer: int,
        *,
        partials: Sequence[Activations],
        to: Literal["normed", "hidden"],
    ) -> None:
        super().__init__(spec, batch, acts, layer)
        self.partials = tuple(each.moe_out for each in partials)
        self.adds = to == "hidden"
        self.target = acts.hidden if self.adds else acts.normed
        self.reads = (*self.partials, self.target) if self.adds else self.partials
        self.writes = (self.target,)

    def work(self) -> Work:
        spec, num_ranks = self.spec, len(self.partials)
        num_numbers = self.batch.num_tokens * spec.hidden_dim
        # A ring: every GPU sends (R - 1) / R of the tensor twice (reduce-scatter, all-gather) and receives as much.
        ring = 2 * (num_ranks - 1) / num_ranks
        touched = num_numbers * (4 + (1 + self.adds + 2 * ring) * spec.dtype_bytes)
        return Work(device_bytes=touched, link_bytes=ring * num_numbers * spec.dtype_bytes)

    def cost_features(self) -> tuple[float, ...]:
        return (float(self.batch.num_tokens), float(len(self.partials)))

    def run(self, ctx: Context, packet: int) -> None:
        spec, n = self.spec, self.batch.num_tokens
        target = rows(ctx, self.target, n, spec.hidden_dim, spec.dtype)
        total = None
        for buffer in self.partials:
            received = rows(ctx, buffer, n, spec.hidden_dim, "float32").to(target.dtype).float()
            total = received if total is None else total + received
        assert total is not None, "a collective has members"
        target.copy_(total.to(target.dtype) + target if self.adds else total)
