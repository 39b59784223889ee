"""Run learned predictors beside the model: their weights on the device, and the ops that apply one and go on teaching
it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from harness.engine.batch import MicroBatch
from harness.engine.emitter import Emitter
from harness.engine.engine import Engine
from harness.engine.in_flight import InFlight
from harness.engine.ops import on_gpu
from harness.engine.ops.data import MicroBatchOp
from harness.engine.ops.predictions import PredictExperts
from harness.engine.ops.views import rows, weights
from harness.llapor import network, online
from harness.llapor.files import PredictorFolder
from harness.llapor.settings import ENDS, MIDDLE
from harness.llapor.shape import PredictorShape, shape_of
from harness.machine.base import GPU, H2D, Context, Lane, LaneKind, Ticket, Work
from harness.memory.placed import PlacedPart
from harness.memory.tiers import DEVICE, PINNED, Buffer, device_tier
from harness.memory.transfers import CopyWeights, ReadPart
from harness.model.layout import PartLayout
from harness.model.spec import ModelSpec

ACCOUNT, UPDATES = "predictors", "updates of predictors"
_PACKET_BYTES = 1 << 22


@dataclass(frozen=True, eq=False, kw_only=True)
class Samples:
    """Memory on the device for what one predictor was asked about `online.BATCH` tokens, and what their router chose.

    `ids` and `chosen` are int64 [tokens, k], of the layer before and of its own; `shares` float32 [tokens, k] are
    weights of `ids`, `reduced` float32 [tokens, pca_dims] is the reduced hidden state.
    """

    ids: Buffer
    chosen: Buffer
    shares: Buffer
    reduced: Buffer

    @classmethod
    def sizes(cls, shape: PredictorShape, k: int) -> dict[str, int]:
        """Return the bytes of each buffer, by name."""
        return {
            name: online.BATCH * nbytes
            for name, nbytes in (("ids", 8 * k), ("chosen", 8 * k), ("shares", 4 * k), ("reduced", 4 * shape.pca_dims))
        }

    @property
    def asked(self) -> tuple[Buffer, ...]:
        return self.ids, self.shares, self.reduced


@dataclass(frozen=True, eq=False)
class Kept:
    """The `rows` of a micro-batch [kept] become samples, from the place `first` on."""

    samples: Samples
    first: int
    rows: NDArray[np.int64]

    @property
    def places(self) -> slice:
        return slice(self.first, self.first + len(self.rows))

    @property
    def is_full(self) -> bool:
        return self.places.stop == online.BATCH


class PredictLearned(PredictExperts):
    """Applies a learned predictor to the experts' input of `layer`, its experts and their weights. `part` is the
    predictor of layer `layer` + `distance`. What it is asked about `kept` tokens becomes samples."""

    kind: ClassVar[str] = "predict experts, learned"

    def __init__(self, *given: Any, kept: Kept | None = None) -> None:
        super().__init__(*given)
        self.kept = kept
        self.reads = (self.acts.normed, self.acts.expert_ids, self.acts.expert_weights, *self.weight_keys)
        if kept is not None:
            self.writes += kept.samples.asked

    def work(self) -> Work:
        """Count matrix products, the predictor's weights once, and what goes in and out of each token."""
        spec, n, shape = self.spec, self.batch.num_tokens, shape_of(self.parts[0].layout)
        token_bytes = spec.hidden_dim * spec.dtype_bytes + 12 * (spec.experts_per_token + self.acts.num_predicted)
        num_kept = 0 if self.kept is None else len(self.kept.rows)
        kept_bytes = num_kept * (4 * shape.pca_dims + 12 * spec.experts_per_token)
        return Work(flops=n * shape.flops_per_token, device_bytes=self.weight_bytes() + n * token_bytes + kept_bytes)

    def run(self, ctx: Context, packet: int) -> None:
        spec, acts, n, k = self.spec, self.acts, self.batch.num_tokens, self.acts.num_predicted
        w = weights(ctx, self.parts[0])
        normed = rows(ctx, acts.normed, n, spec.hidden_dim, spec.dtype)
        ids = rows(ctx, acts.expert_ids, n, spec.experts_per_token, "int64")
        shares = rows(ctx, acts.expert_weights, n, spec.experts_per_token, "float32")
        reduced, routed = network.features(w, normed, ids, shares)
        likely = network.chances(w, network.logits(w, reduced, routed)).topk(k, dim=-1)
        rows(ctx, acts.predicted_ids, n, k, "int64").copy_(likely.indices)
        rows(ctx, acts.predicted_chances, n, k, "float32").copy_(likely.values)
        if (kept := self.kept) is not None:
            at, own = on_gpu.numbers(kept.rows, ids.device), kept.samples
            for buffer, found, dtype in ((own.ids, ids, "int64"), (own.shares, shares, "float32"),
                                         (own.reduced, reduced, "float32")):  # fmt: skip
                rows(ctx, buffer, online.BATCH, found.shape[1], dtype)[kept.places] = found[at]


class LearnFromRouting(MicroBatchOp):
    """Adds what the router of `layer` has chosen to the samples that its predictor was asked about. Once there are
    `online.BATCH` of them, it does `steps` steps of learning, the first of which has the number `number`."""

    kind: ClassVar[str] = "learn to predict experts"

    def __init__(
        self, spec: ModelSpec, batch: MicroBatch, acts: Any, layer: int, *, part: PlacedPart, kept: Kept,
        moments: Buffer, pace: online.Pace, number: int, steps: int,
    ) -> None:  # fmt: skip
        super().__init__(spec, batch, acts, layer)
        self.part, self.kept, self.moments, self.pace, self.number, self.steps = (
            part,
            kept,
            moments,
            pace,
            number,
            steps,
        )
        self.reads, self.writes = (acts.expert_ids,), (kept.samples.chosen,)
        if kept.is_full:
            self.reads += (*part.keys, *kept.samples.asked, kept.samples.chosen, moments)
            self.writes += (*part.keys, moments)

    def work(self) -> Work:
        """Count, for a step, the products forward and backward, and weights, gradients and moments as often as they
        are read or written."""
        copied = 16 * self.spec.experts_per_token * len(self.kept.rows)
        if not self.kept.is_full:
            return Work(device_bytes=copied)
        shape = shape_of(self.part.layout)
        products = sum(size[0] * size[1] for size in online.learned_sizes(shape).values() if len(size) == 2)
        nbytes = 4 * online.num_learned(shape)
        moved = 4 * nbytes + 2 * nbytes + 4 * nbytes  # weights, gradients, moments
        return Work(
            flops=self.steps * 3 * 2 * online.BATCH * products, device_bytes=copied + self.steps * moved
        )  # fmt: skip

    def run(self, ctx: Context, packet: int) -> None:
        spec, kept, own, k = self.spec, self.kept, self.kept.samples, self.spec.experts_per_token
        found = rows(ctx, self.acts.expert_ids, self.batch.num_tokens, k, "int64")
        chosen = rows(ctx, own.chosen, online.BATCH, k, "int64")
        chosen[kept.places] = found[on_gpu.numbers(kept.rows, found.device)]
        if not kept.is_full:
            return
        w, shape = weights(ctx, self.part), shape_of(self.part.layout)
        ids, shares = rows(ctx, own.ids, online.BATCH, k, "int64"), rows(ctx, own.shares, online.BATCH, k, "float32")
        routed = network.routing_features(ids, shares, spec.num_experts)
        reduced = rows(ctx, own.reduced, online.BATCH, shape.pca_dims, "float32")
        moments = rows(ctx, self.moments, 2, online.num_learned(shape), "float32")
        target = online.targets(chosen, spec.num_experts)
        for number in range(self.number, self.number + self.steps):
            online.step(w, moments, number, reduced, routed, target, self.pace)


class OnlineUpdates:
    """Lets predictors go on learning in the run: on the gpu lane, behind a layer's experts.

    Of each pass, tokens of the first micro-batch become samples, evenly spread over it, until a layer has
    `online.BATCH` of them; then its predictor does `steps` steps, and samples are collected anew. What a profile run
    routes, whose requests have negative numbers, is not learned from.
    """

    def __init__(
        self, engine: Engine, predictors: Mapping[int, PlacedPart], paces: Mapping[int, online.Pace], steps: int
    ) -> None:
        self._spec, self._predictors, self._paces, self._steps = engine.spec, predictors, paces, steps
        self._filled, self._number = dict.fromkeys(predictors, 0), dict.fromkeys(predictors, 0)
        self._kept: dict[int, Kept] = {}
        self._samples: dict[int, Samples] = {}
        self._moments: dict[int, Buffer] = {}
        shapes = {layer: shape_of(part.layout) for layer, part in predictors.items()}
        sizes = {
            layer: {"moments": 8 * online.num_learned(shape), **Samples.sizes(shape, self._spec.experts_per_token)}
            for layer, shape in shapes.items()
        }
        memory = engine.machine.tiers[DEVICE].reserve(UPDATES, sum(sum(each.values()) for each in sizes.values()))
        at = 0
        for layer, each in sizes.items():
            buffers = {}
            for name, nbytes in each.items():
                buffers[name] = memory.sub(f"{name} of layer {layer}", at, nbytes)
                at += nbytes
            self._moments[layer] = buffers.pop("moments")
            self._samples[layer] = Samples(**buffers)

    def keep(self, layer: int, batch: MicroBatch) -> Kept | None:
        """Choose the tokens of a micro-batch that become samples of the predictor of `layer`."""
        if batch.index or int(batch.request_ids.min()) < 0:
            return None
        n, first = batch.num_tokens, self._filled[layer]
        number = min(n, online.BATCH - first)
        self._kept[layer] = Kept(self._samples[layer], first, np.arange(number) * n // number)
        return self._kept[layer]

    def learn(self, emit: Emitter, it: InFlight, layer: int) -> Ticket | None:
        """Submit what is learned from the routing of a layer, if tokens were kept for it."""
        if (kept := self._kept.pop(layer, None)) is None:
            return None
        op = LearnFromRouting(
            self._spec, it.batch, it.acts, layer, part=self._predictors[layer], kept=kept,
            moments=self._moments[layer], pace=self._paces[layer], number=self._number[layer], steps=self._steps,
        )  # fmt: skip
        self._filled[layer] = 0 if kept.is_full else kept.places.stop
        self._number[layer] += self._steps if kept.is_full else 0
        return emit.submit(GPU, op)


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


def paces_of(layers: Iterable[int], folder: PredictorFolder | None) -> dict[int, online.Pace]:
    """Return at what pace the predictor of each layer goes on learning: by the settings that it was trained with.
    Without a folder nothing is learned, and any will do."""
    return {layer: online.Pace.of(folder.trained_with(layer) if folder else ENDS) for layer in layers}


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
