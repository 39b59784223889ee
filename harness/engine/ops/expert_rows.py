"""Bring rows to experts and their results back: over the links, and within host memory."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from torch import from_numpy

from harness.engine.activations import Activations
from harness.engine.batch import MicroBatch
from harness.engine.ops.data import LoadHidden, MicroBatchOp, OffloadHidden
from harness.engine.ops.views import all_rows, rows
from harness.machine.base import Context, Op, Work
from harness.memory.tiers import Buffer
from harness.model.spec import ModelSpec


class OffloadExpertInput(MicroBatchOp):
    """Copy normed hidden states and the router's choices with their weights, device -> host."""

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


class MoveRows(Op):
    """Copy the first `num_rows` rows [hidden] of a buffer to another one over a link."""

    in_float32: ClassVar[bool]  # else in the model's dtype

    def __init__(
        self,
        spec: ModelSpec,
        source: Buffer,
        target: Buffer,
        num_rows: int,
        layer: int,
        micro_batch: int | None = None,
    ) -> None:
        self.spec, self.source, self.target, self.num_rows = spec, source, target, num_rows
        self.layer, self.micro_batch = layer, micro_batch
        self.reads, self.writes = (source,), (target,)

    def work(self) -> Work:
        nbytes = self.num_rows * self.spec.hidden_dim * (4 if self.in_float32 else self.spec.dtype_bytes)
        return Work(device_bytes=nbytes, host_bytes=nbytes, link_bytes=nbytes)

    def cost_features(self) -> tuple[float, ...]:
        return (float(self.num_rows),)

    def run(self, ctx: Context, packet: int) -> None:
        n, width, dtype = self.num_rows, self.spec.hidden_dim, "float32" if self.in_float32 else self.spec.dtype
        ctx.move(rows(ctx, self.target, n, width, dtype), rows(ctx, self.source, n, width, dtype))


class OffloadRows(MoveRows):
    """Copy rows for experts, device -> host."""

    kind: ClassVar[str] = "offload rows"
    in_float32: ClassVar[bool] = False

    @property
    def cost_key(self) -> str:
        """The kind under which calibrations measure it: hidden states, which are the same bytes."""
        return OffloadHidden.kind


class LoadRows(MoveRows):
    """Copy rows for experts, host -> device."""

    kind: ClassVar[str] = "load rows"
    in_float32: ClassVar[bool] = False

    @property
    def cost_key(self) -> str:
        """The kind under which calibrations measure it: hidden states, which are the same bytes."""
        return LoadHidden.kind


class OffloadResults(MoveRows):
    """Copy an expert's results, device -> host, in float32."""

    kind: ClassVar[str] = "offload results"
    in_float32: ClassVar[bool] = True

    @property
    def cost_key(self) -> str:
        """The kind under which calibrations measure it: hidden states. The larger number of bytes over the link is
        counted by rate."""
        return OffloadHidden.kind


class LoadExpertSums(MoveRows):
    """Copy the sums of experts on the host, which go to the residual stream, host -> device, in float32."""

    kind: ClassVar[str] = "load expert sums"
    in_float32: ClassVar[bool] = True


class Gather(Op):
    """Gather rows in host memory (cpu lane). Rows `tokens` (int64 [n]) of `source` go to the first n rows of `target`,
    both [rows, hidden] in the model's dtype."""

    kind: ClassVar[str] = "gather rows"

    def __init__(self, spec: ModelSpec, source: Buffer, target: Buffer, tokens: np.ndarray, layer: int) -> None:
        self.spec, self.source, self.target, self.tokens, self.layer = spec, source, target, tokens, layer
        self.reads, self.writes = (source,), (target,)

    def work(self) -> Work:
        return Work(host_bytes=2 * len(self.tokens) * self.spec.hidden_dim * self.spec.dtype_bytes)

    def cost_features(self) -> tuple[float, ...]:
        return (float(len(self.tokens)),)

    def run(self, ctx: Context, packet: int) -> None:
        source, target = (all_rows(ctx, each, self.spec, self.spec.dtype) for each in (self.source, self.target))
        target[: len(self.tokens)] = source[from_numpy(self.tokens)]


class AddWeighted(Op):
    """Add the first rows of `results`, each times its weight (float32 [n]), to rows `tokens` of `sums`. `tokens` (int64
    [n]) has no row twice; `results` and `sums` are float32 [rows, hidden] in host memory (cpu lane)."""

    kind: ClassVar[str] = "add weighted rows"

    def __init__(
        self, spec: ModelSpec, results: Buffer, sums: Buffer, tokens: np.ndarray, weights: np.ndarray, layer: int
    ) -> None:
        self.spec, self.results, self.sums, self.layer = spec, results, sums, layer
        self.tokens, self.weights = tokens, weights
        self.reads, self.writes = (results,), (sums,)

    def work(self) -> Work:
        """Count the bytes in host memory: a result is read, a sum read and written."""
        return Work(host_bytes=3 * 4 * len(self.tokens) * self.spec.hidden_dim)

    def cost_features(self) -> tuple[float, ...]:
        return (float(len(self.tokens)),)

    def run(self, ctx: Context, packet: int) -> None:
        results, sums = (all_rows(ctx, each, self.spec, "float32") for each in (self.results, self.sums))
        weighted = results[: len(self.tokens)] * from_numpy(self.weights)[:, None]
        sums.index_add_(0, from_numpy(self.tokens), weighted)


class ClearSums(Op):
    """Set the first `num_rows` rows of float32 sums [rows, hidden] in host memory to 0 (cpu lane)."""

    kind: ClassVar[str] = "clear sums"

    def __init__(self, spec: ModelSpec, sums: Buffer, num_rows: int, layer: int) -> None:
        self.spec, self.sums, self.num_rows, self.layer = spec, sums, num_rows, layer
        self.writes = (sums,)

    def work(self) -> Work:
        return Work(host_bytes=4 * self.num_rows * self.spec.hidden_dim)

    def cost_features(self) -> tuple[float, ...]:
        return (float(self.num_rows),)

    def run(self, ctx: Context, packet: int) -> None:
        rows(ctx, self.sums, self.num_rows, self.spec.hidden_dim, "float32").zero_()
