"""Experts on the CPU: their tokens to host memory, the experts over weights that stay there, the sums back."""

from __future__ import annotations

from typing import Any, ClassVar

import kernels
from harness.engine.activations import Activations
from harness.engine.batch import MicroBatch
from harness.engine.ops.compute import Experts
from harness.engine.ops.data import MicroBatchOp
from harness.engine.ops.views import rows, weights
from harness.machine.base import Context, Work
from harness.memory.weights import PlacedPart
from harness.model.spec import ModelSpec
from kernels.triton.matrices import SILU


class OffloadExpertInput(MicroBatchOp):
    """Normed hidden states and routes, device -> host."""

    kind: ClassVar[str] = "offload expert input"

    def __init__(self, spec: ModelSpec, batch: MicroBatch, acts: Activations, layer: int) -> None:
        super().__init__(spec, batch, acts, layer)
        self.reads = (acts.normed, acts.expert_ids, acts.expert_weights)
        self.writes = (acts.host_normed, acts.host_expert_ids, acts.host_expert_weights)

    def work(self) -> Work:
        spec = self.spec
        nbytes = self.batch.num_tokens * (spec.hidden_dim * spec.dtype_bytes + spec.experts_per_token * 12)
        return Work(device_bytes=nbytes, host_bytes=nbytes, link_bytes=nbytes)

    def cost_features(self) -> tuple[float, ...]:
        return (float(self.batch.num_tokens),)

    def run(self, ctx: Context, packet: int) -> None:
        n, k = self.batch.num_tokens, self.spec.experts_per_token
        acts = self.acts
        for source, target, width, dtype in (
            (acts.normed, acts.host_normed, self.spec.hidden_dim, self.spec.dtype),
            (acts.expert_ids, acts.host_expert_ids, k, "int64"),
            (acts.expert_weights, acts.host_expert_weights, k, "float32"),
        ):
            ctx.move(rows(ctx, target, n, width, dtype), rows(ctx, source, n, width, dtype))


class ExpertOnHost(Experts):
    """One expert on the cpu lane over the tokens routed to it, with its weights where the host stores them. Weighted
    results are added to `host_moe_out` (float32), which the `first` of a layer's experts sets to 0 before."""

    def __init__(
        self,
        family: Any,
        spec: ModelSpec,
        batch: MicroBatch,
        acts: Activations,
        part: PlacedPart,
        expert: int,
        layer: int,
        routed: Any = None,  # int64 [num_experts]
        *,
        first: bool,
    ) -> None:
        super().__init__(family, spec, batch, acts, (part,), (expert,), layer, routed)
        self.first = first
        self.reads = (acts.host_normed, acts.host_expert_ids, acts.host_expert_weights, *self.weight_keys)
        self.writes = (acts.host_moe_out,)

    def work(self) -> Work:
        """All memory that it touches is the host's."""
        on_gpu = super().work()
        return Work(flops=on_gpu.flops, host_bytes=on_gpu.device_bytes)

    def run(self, ctx: Context, packet: int) -> None:
        spec, acts, n, (expert,) = self.spec, self.acts, self.batch.num_tokens, self.experts
        out = rows(ctx, acts.host_moe_out, n, spec.hidden_dim, "float32")
        if self.first:
            out.zero_()
        ids = rows(ctx, acts.host_expert_ids, n, spec.experts_per_token, "int64").reshape(-1)
        chosen = (ids == expert).nonzero().reshape(-1)
        if not len(chosen):
            return
        tokens = chosen // spec.experts_per_token
        x = rows(ctx, acts.host_normed, n, spec.hidden_dim, spec.dtype)[tokens]
        probs = rows(ctx, acts.host_expert_weights, n, spec.experts_per_token, "float32").reshape(-1)[chosen]
        out.index_add_(0, tokens, self._weighted(ctx, x, probs))

    def _weighted(self, ctx: Context, x: Any, probs: Any) -> Any:
        """float32 [m, hidden]: by the kernel that CPUs have for bfloat16, by the family's own math otherwise."""
        w = weights(ctx, self.parts[0])
        if self.spec.dtype == "bfloat16":
            m = self.family.expert_matrices(self.spec, w)
            if m.activation == SILU and not m.biases:
                y = probs.new_empty(x.shape)
                kernels.expert_ffn(x, m.gate, m.up, m.down, y, row_weights=probs, num_threads=ctx.num_threads())
                return y
        return self.family.expert(self.spec, w, x).float().mul_(probs[:, None])


class LoadExpertSums(MicroBatchOp):
    """What the experts on the CPU add to the residual stream, host -> device, in float32."""

    kind: ClassVar[str] = "load expert sums"

    def __init__(self, spec: ModelSpec, batch: MicroBatch, acts: Activations, layer: int) -> None:
        super().__init__(spec, batch, acts, layer)
        self.reads, self.writes = (acts.host_moe_out,), (acts.moe_out,)

    def work(self) -> Work:
        nbytes = self.batch.num_tokens * self.spec.hidden_dim * 4
        return Work(device_bytes=nbytes, host_bytes=nbytes, link_bytes=nbytes)

    def cost_features(self) -> tuple[float, ...]:
        return (float(self.batch.num_tokens),)

    def run(self, ctx: Context, packet: int) -> None:
        n, width = self.batch.num_tokens, self.spec.hidden_dim
        source = rows(ctx, self.acts.host_moe_out, n, width, "float32")
        ctx.move(rows(ctx, self.acts.moe_out, n, width, "float32"), source)
