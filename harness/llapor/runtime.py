"""Run learned predictors beside the model: their weights on the device, and the op that applies one of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from harness.engine.engine import Engine
from harness.engine.ops.predictions import PredictExperts
from harness.engine.ops.views import rows, weights
from harness.llapor import network
from harness.llapor.files import PredictorFolder
from harness.llapor.settings import ENDS, MIDDLE
from harness.llapor.shape import PredictorShape, shape_of
from harness.machine.base import H2D, Context, Lane, LaneKind, Work
from harness.memory.placed import PlacedPart
from harness.memory.tiers import PINNED, device_tier
from harness.memory.transfers import CopyWeights, ReadPart
from harness.model.layout import PartLayout
from harness.model.spec import ModelSpec

ACCOUNT = "predictors"
_PACKET_BYTES = 1 << 22


class PredictLearned(PredictExperts):
    """Applies a learned predictor to the experts' input of `layer`, its experts and their weights. `part` is the
    predictor of layer `layer` + `distance`."""

    kind: ClassVar[str] = "predict experts, learned"

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.reads = (self.acts.normed, self.acts.expert_ids, self.acts.expert_weights, *self.weight_keys)

    def work(self) -> Work:
        """Count matrix products, the predictor's weights once, and what goes in and out of each token."""
        spec, n = self.spec, self.batch.num_tokens
        token_bytes = spec.hidden_dim * spec.dtype_bytes + 12 * (spec.experts_per_token + self.acts.num_predicted)
        flops = n * shape_of(self.parts[0].layout).flops_per_token
        return Work(flops=flops, device_bytes=self.weight_bytes() + n * token_bytes)

    def run(self, ctx: Context, packet: int) -> None:
        spec, acts, n, k = self.spec, self.acts, self.batch.num_tokens, self.acts.num_predicted
        normed = rows(ctx, acts.normed, n, spec.hidden_dim, spec.dtype)
        ids = rows(ctx, acts.expert_ids, n, spec.experts_per_token, "int64")
        shares = rows(ctx, acts.expert_weights, n, spec.experts_per_token, "float32")
        found, likely = network.foresee(weights(ctx, self.parts[0]), normed, ids, shares, k)
        rows(ctx, acts.predicted_ids, n, k, "int64").copy_(found)
        rows(ctx, acts.predicted_chances, n, k, "float32").copy_(likely)


def stated_shapes(spec: ModelSpec) -> dict[int, PredictorShape]:
    """Return, by layer, the predictors that PreScope §4.2 describes for a model of these dimensions.

    Nothing was learned, so they serve simulations alone. The paper does not say where its groups end: the first and the
    last quarter of the layers count as near input and output here.
    """
    layers = spec.moe_layers[1:]
    quarter = len(layers) / 4
    found = {}
    for place, layer in enumerate(layers):
        is_middle = quarter <= place < len(layers) - quarter
        group = MIDDLE if is_middle else ENDS
        dims = min(group.pca_dims, spec.hidden_dim)
        found[layer] = PredictorShape(spec.hidden_dim, spec.num_experts, dims, group.width, is_deep=is_middle)
    return found


class _FolderSource:
    """Reads predictors into memory, as a checkpoint's parts are read."""

    def __init__(self, folder: PredictorFolder) -> None:
        self._folder = folder

    def read_part(self, layer: int | None, part: PartLayout, out: Any) -> None:
        assert layer is not None
        found = self._folder.tensors(layer)
        for tensor in part.tensors:
            array = torch.from_numpy(found[tensor.name]).contiguous()
            target = out[tensor.offset_bytes : tensor.offset_bytes + tensor.nbytes]
            target.copy_(array.flatten().view(torch.uint8))


def place_predictors(engine: Engine, folder: PredictorFolder | None) -> dict[int, list[PlacedPart]]:
    """Put the predictors of a folder on every GPU, under the name "predictors", and return them by layer and GPU.

    Without a folder they are `stated_shapes` without numbers. Raises MemoryCapacityError.
    """
    shapes = stated_shapes(engine.spec) if folder is None else folder.shapes()
    layouts = {layer: shape.layout() for layer, shape in shapes.items()}
    machine, nbytes = engine.machine, sum(layout.nbytes for layout in layouts.values())
    on_host = machine.tiers[PINNED].reserve(f"{ACCOUNT}, before they are on the device", nbytes)
    source: Any = None if folder is None else _FolderSource(folder)
    placed: dict[int, list[PlacedPart]] = {layer: [] for layer in layouts}
    for each in engine.ranks:
        on_device = machine.tiers[device_tier(each.rank)].reserve(ACCOUNT, nbytes)
        for (layer, layout), offset_bytes in zip(layouts.items(), _offsets(layouts), strict=True):
            stored, target = (
                root.sub(f"predictor of layer {layer}", offset_bytes, layout.nbytes) for root in (on_host, on_device)
            )
            if each is engine:
                machine.submit(H2D, ReadPart(source, layer, layout, stored))
            part = PlacedPart(layout, stored, (stored,))
            copy = CopyWeights(part, target, layer=None, packet_bytes=_PACKET_BYTES)
            machine.submit(Lane(LaneKind.H2D, each.rank), copy)
            placed[layer].append(PlacedPart(layout, target, (target,)))
    machine.drain()
    machine.tiers[PINNED].release(on_host)
    return placed


def _offsets(layouts: Mapping[int, PartLayout]) -> list[int]:
    found, at = [], 0
    for layout in layouts.values():
        found.append(at)
        at += layout.nbytes
    return found
