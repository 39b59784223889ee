"""Predict the experts of a later layer by that layer's own router, from what is known in an earlier one."""

from __future__ import annotations

from typing import Any, ClassVar

from harness.engine.activations import Activations
from harness.engine.batch import MicroBatch
from harness.engine.ops.compute import ComputeOp
from harness.engine.ops.data import FetchRouting, MicroBatchOp
from harness.engine.ops.views import rows, weights
from harness.machine.base import Context, Work
from harness.memory.placed import PlacedPart
from harness.model.spec import ModelSpec


class PredictExperts(ComputeOp):
    """Applies the router of layer `layer` + `distance` to the experts' input of `layer`. `part` has that router's
    weights. The `acts.num_predicted` best experts of each token, and the probability that the router will choose each,
    are kept in `acts`."""

    kind: ClassVar[str] = "predict experts"

    def __init__(
        self,
        family: Any,
        spec: ModelSpec,
        batch: MicroBatch,
        acts: Activations,
        part: PlacedPart,
        layer: int,
        distance: int,
    ) -> None:
        super().__init__(family, spec, batch, acts, (part,), layer)
        self.predicted_layer = predicted_layer(spec, layer, distance)
        self.reads = (acts.normed, *self.weight_keys)
        self.writes = (acts.predicted_ids, acts.predicted_chances)

    def work(self) -> Work:
        """Count the router's matrix alone, whatever else its part has."""
        spec, n = self.spec, self.batch.num_tokens
        matrices = [tensor for tensor in self.parts[0].layout.tensors if tensor.name == "router"]
        router_bytes = spec.hidden_dim * spec.num_experts * spec.dtype_bytes
        if matrices:  # whose dtype may be another one than the model's
            router_bytes = sum(tensor.nbytes for tensor in matrices)
        moved = n * (spec.hidden_dim * spec.dtype_bytes + 12 * self.acts.num_predicted)
        return Work(flops=2 * n * spec.hidden_dim * spec.num_experts, device_bytes=router_bytes + moved)

    def cost_features(self) -> tuple[float, ...]:
        return (float(self.batch.num_tokens),)

    def run(self, ctx: Context, packet: int) -> None:
        n, k = self.batch.num_tokens, self.acts.num_predicted
        w, spec = weights(ctx, self.parts[0]), self.spec
        normed = rows(ctx, self.acts.normed, n, spec.hidden_dim, spec.dtype)
        logits = self.family.router_logits(spec, w, normed, self.predicted_layer)
        ids, chances = self.family.foresee(spec, w, logits, k, self.predicted_layer)
        rows(ctx, self.acts.predicted_ids, n, k, "int64").copy_(ids)
        rows(ctx, self.acts.predicted_chances, n, k, "float32").copy_(chances)


class FetchPrediction(MicroBatchOp):
    """Fetch predicted experts to the host and the probability that the router will choose each; value: int64 and
    float32 [tokens, predicted]. A machine without tensors says what its world predicts, no more experts of a token
    than that."""

    kind: ClassVar[str] = "fetch prediction"

    def __init__(self, spec: ModelSpec, batch: MicroBatch, acts: Activations, layer: int, distance: int) -> None:
        super().__init__(spec, batch, acts, layer)
        self.predicted_layer, self.distance = predicted_layer(spec, layer, distance), distance
        self.reads = (acts.predicted_ids, acts.predicted_chances)

    def work(self) -> Work:
        return Work(link_bytes=12 * self.batch.num_tokens * self.acts.num_predicted)

    @property
    def cost_key(self) -> str:
        """The kind under which calibrations measure it: `FetchRouting`. The bytes over the link are counted by
        rate."""
        return FetchRouting.kind

    def cost_features(self) -> tuple[float, ...]:
        return (float(self.batch.num_tokens),)

    def run(self, ctx: Context, packet: int) -> Any:
        shape = (self.batch.num_tokens, self.acts.num_predicted)
        ids, chances = (self.acts.predicted_ids, "int64"), (self.acts.predicted_chances, "float32")
        return tuple(ctx.host_value(ctx.tensor(buffer, shape, dtype)) for buffer, dtype in (ids, chances))

    def imagine(self, world: Any) -> Any:
        ids, likely = world.predicted(self.batch, self.predicted_layer, self.distance)
        k = self.acts.num_predicted
        return ids[:, :k], likely[:, :k].astype("float32")


def predicted_layer(spec: ModelSpec, layer: int, distance: int) -> int:
    """Return the layer that a prediction is for. AssertionError where it has no router."""
    found = layer + distance
    assert distance >= 1 and found < spec.num_layers and not spec.is_dense(found), f"layer {found} has no router ahead"
    return found
