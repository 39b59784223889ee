"""Run routed experts as ops, on the gpu lane or the cpu lane, wherever their weights lie.

`Experts` finds its rows by the router's choices when it runs; `Expert` runs over rows chosen by its submitter, which
has seen the routing. Results are float32 and, weighted, added to sums that may hold other experts' results. Where rows
wait in another memory than the one the expert computes in, ops of `expert_rows` bring them there.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
from torch import uint8

import kernels
from harness.engine.activations import Activations
from harness.engine.batch import MicroBatch
from harness.engine.ops import on_gpu
from harness.engine.ops.alike import once_a_batch
from harness.engine.ops.compute import ComputeOp
from harness.engine.ops.views import all_rows, expert_weights, matrices, rows, weights
from harness.machine.base import Context, Op, Work
from harness.memory.placed import PlacedPart
from harness.memory.tiers import Buffer
from harness.model.spec import ModelSpec


class Experts(ComputeOp):
    """Run some experts, one after another, each over the tokens routed to it, and add the weighted results to the sums.

    `experts` names the experts behind `parts`, ascending. With `on_host` rows and sums are those in host memory, and
    the cpu lane runs the op. `clears` sets the sums to 0 before. A machine without tensors may know how many tokens
    choose each expert (`foresee`). Otherwise work assumes even routing: the expected tokens, and the expected number of
    experts that get any. On the host each expert is a launch, but for those without tokens where these are known. On
    the device all count as one. The whole layer has a cost of its own; some experts cost by how many of them have
    tokens, and by these.
    """

    kind: ClassVar[str] = "experts"

    def __init__(
        self,
        family: Any,
        spec: ModelSpec,
        batch: MicroBatch,
        acts: Activations,
        parts: tuple[PlacedPart, ...],
        experts: tuple[int, ...],
        layer: int,
        *,
        on_host: bool = False,
        clears: bool = False,
    ) -> None:
        super().__init__(family, spec, batch, acts, parts, layer)
        self.experts, self.on_host, self.clears = experts, on_host, clears
        self.counts: list[int] | None = None  # tokens of each of its experts, once that is known
        self.launches = len(experts) if on_host else 1
        if on_host:
            self._rows = (acts.host_normed, acts.host_expert_ids, acts.host_expert_weights)
        else:
            self._rows = (acts.normed, acts.expert_ids, acts.expert_weights)
        self._sums = acts.host_moe_out if on_host else acts.moe_out
        self.reads, self.writes = (*self._rows, *self.weight_keys), (self._sums,)

    def foresee(self, world: Any) -> None:
        routed = world.expert_counts(self.batch, self.layer)
        if routed is not None:
            self._know(routed[list(self.experts)].tolist())

    def _know(self, counts: list[int]) -> None:
        self.counts = counts
        if self.on_host:
            self.launches = self._num_active

    @property
    def _num_active(self) -> int:
        """The number of its experts that have tokens, at least one; the expected one where that is not known.

        That is not one where there are several experts, for they must not count as a single one.
        """
        if self.counts is None:
            return max(min(2, len(self.experts)), round(len(self.experts) * self._reached))
        return max(1, sum(map(bool, self.counts)))

    @property
    def _has_all(self) -> bool:
        return not self.on_host and len(self.experts) == self.spec.num_experts

    @property
    def joined(self) -> int:
        return 1 if self._has_all else self._num_active

    @property
    def _share(self) -> float:
        """The share of the tokens that an expert gets under even routing."""
        return self.spec.experts_per_token / self.spec.num_experts

    @property
    def _reached(self) -> float:
        """The chance that an expert gets any token under even routing."""
        return 1 - (1 - self._share) ** self.batch.num_tokens

    def work(self) -> Work:
        if self.counts is None:
            return self._expected_work()
        read_bytes = sum(part.layout.nbytes for part, n in zip(self.parts, self.counts, strict=True) if n)
        return _expert_work(self.spec, sum(self.counts), read_bytes, on_host=self.on_host)

    @once_a_batch(lambda op: (len(op.experts), op.weight_bytes(), op.on_host))
    def _expected_work(self) -> Work:
        tokens = self.batch.num_tokens * self._share * len(self.experts)
        # An expert's weights are read if any token reaches it.
        read_bytes = self.weight_bytes() * self._reached
        return _expert_work(self.spec, tokens, read_bytes, on_host=self.on_host)

    def launch_works(self) -> list[Work]:
        if self.counts is None:
            return list(super().launch_works())
        sized = [(part.layout.nbytes, n) for part, n in zip(self.parts, self.counts, strict=True) if n]
        return [_expert_work(self.spec, n, nbytes, on_host=self.on_host) for nbytes, n in sized]

    @property
    def cost_key(self) -> str:
        """The kind with the number of experts: all of a layer, in one launch on the device, or one: any others are
        several of these."""
        return f"{self.kind} x{len(self.experts) if self._has_all else 1}"

    def cost_features(self) -> tuple[float, ...]:
        """Return the tokens of a micro-batch that, under even routing, would bring these experts as many tokens as they
        get. Unless they are all of the layer, in one launch, only those that get any count."""
        sharing = len(self.experts) if self._has_all else self.joined
        if self.counts is None:
            return (self.batch.num_tokens * len(self.experts) / sharing,)
        return (sum(self.counts) / (self._share * sharing),)

    def run(self, ctx: Context, packet: int) -> None:
        spec, n = self.spec, self.batch.num_tokens
        normed = rows(ctx, self._rows[0], n, spec.hidden_dim, spec.dtype)
        ids = rows(ctx, self._rows[1], n, spec.experts_per_token, "int64")
        probs = rows(ctx, self._rows[2], n, spec.experts_per_token, "float32")
        out = rows(ctx, self._sums, n, spec.hidden_dim, "float32")
        if self.clears:
            out.zero_()
        if on_gpu.groups_experts(normed):
            placed = {
                e: matrices(ctx, self.family, spec, part) for e, part in zip(self.experts, self.parts, strict=True)
            }
            scratch = normed.new_empty(self.acts.workspace.nbytes, dtype=uint8)  # room that torch's allocator keeps
            return on_gpu.experts(spec, normed, ids, probs, out, placed, scratch)
        tokens, probs, counts = self._by_expert(ids, probs)
        self._know(counts)
        if len(tokens) == 0:
            return
        x = normed.index_select(0, tokens)
        y = x.new_empty(x.shape, dtype=out.dtype)
        _run_experts(ctx, self.family, spec, self.parts, counts, x, y, probs)
        out.index_add_(0, tokens, y)

    def _by_expert(self, ids: Any, probs: Any) -> tuple[Any, Any, list[int]]:
        """Return the rows of this op's experts and their weights, grouped in the experts' order, and how many each
        has."""
        # Numpy, since each torch call gives the interpreter away, and getting it back can take longer than the math.
        chosen, counts = self._pairs(ids.cpu().numpy().reshape(-1))
        tokens, picked = chosen // self.spec.experts_per_token, probs.cpu().numpy().reshape(-1)[chosen]
        return on_gpu.numbers(tokens, ids.device), on_gpu.numbers(picked, ids.device), counts

    def _pairs(self, ids: np.ndarray) -> tuple[np.ndarray, list[int]]:
        """Return the (token, choice) pairs of this op's experts, grouped in their order, and how many each expert
        has."""
        if len(self.experts) == 1:
            chosen = np.flatnonzero(ids == self.experts[0])
            return chosen, [len(chosen)]
        order = ids.astype(np.int16).argsort(kind="stable")  # numpy sorts 16 bits by their digits
        starts = ids[order].searchsorted(np.arange(self.spec.num_experts + 1)).tolist()
        if len(self.experts) == self.spec.num_experts:
            return order[starts[0] : starts[-1]], [end - start for start, end in pairwise(starts)]
        groups = [order[starts[expert] : starts[expert + 1]] for expert in self.experts]
        return np.concatenate(groups), [len(group) for group in groups]


class Expert(Op):
    """Run one expert over rows that its submitter chose.

    Without `tokens` it runs over the first `num_rows` rows of `source`; the results, not weighted, are the first rows
    of `target`. With `tokens` (int64 [num_rows], no row twice) and their `weights` (float32) it runs over those rows of
    `source`; the weighted results are added to the same rows of `target`. Both buffers lie where the lane computes: in
    host memory with `on_host`. `source` is [rows, hidden] in the model's dtype, `target` [rows, hidden] in float32.
    """

    kind: ClassVar[str] = Experts.kind

    def __init__(
        self,
        family: Any,
        spec: ModelSpec,
        part: PlacedPart,
        source: Buffer,
        target: Buffer,
        num_rows: int,
        *,
        layer: int | None = None,
        tokens: np.ndarray | None = None,
        weights: np.ndarray | None = None,
        on_host: bool = False,
    ) -> None:
        assert (tokens is None) == (weights is None), "tokens come with their weights"
        self.family, self.spec, self.part, self.layer = family, spec, part, layer
        self.source, self.target, self.num_rows = source, target, num_rows
        self.tokens, self.weights, self.on_host = tokens, weights, on_host
        self.weight_keys = part.keys
        self.reads, self.writes = (source, *part.keys), (target,)

    def work(self) -> Work:
        return _expert_work(self.spec, self.num_rows, self.part.layout.nbytes, on_host=self.on_host)

    @property
    def cost_key(self) -> str:
        """The kind, with what it spares beside an `Experts` of one: nobody looks for its rows."""
        return f"{self.kind} x1, given rows"

    def cost_features(self) -> tuple[float, ...]:
        """Return the tokens of a micro-batch that, under even routing, would bring one expert so many rows, as
        `Experts` does."""
        return (self.num_rows * self.spec.num_experts / self.spec.experts_per_token,)

    def run(self, ctx: Context, packet: int) -> None:
        spec = self.spec
        x, y = all_rows(ctx, self.source, spec, spec.dtype), all_rows(ctx, self.target, spec, "float32")
        if self.tokens is None or self.weights is None:
            mine = slice(self.num_rows)
            return _run_experts(ctx, self.family, spec, (self.part,), [self.num_rows], x[mine], y[mine], None)
        tokens, probs = on_gpu.numbers(self.tokens, x.device), on_gpu.numbers(self.weights, x.device)
        results = y.new_empty((self.num_rows, spec.hidden_dim))
        _run_experts(ctx, self.family, spec, (self.part,), [self.num_rows], x[tokens], results, probs)
        y.index_add_(0, tokens, results)


def _expert_work(spec: ModelSpec, tokens: float, read_bytes: float, *, on_host: bool) -> Work:
    """Return an expert's work with weights and rows in one memory: the host's or the device's."""
    moved = tokens * (2 * spec.hidden_dim + 3 * spec.expert_dim) * spec.dtype_bytes
    flops, nbytes = 2 * tokens * spec.expert_params, read_bytes + moved
    return Work(flops=flops, host_bytes=nbytes) if on_host else Work(flops=flops, device_bytes=nbytes)


def _run_experts(
    ctx: Context,
    family: Any,
    spec: ModelSpec,
    parts: tuple[PlacedPart, ...],
    counts: list[int],
    x: Any,
    out: Any,
    probs: Any,
) -> None:
    """Write the results of experts over rows `x` [rows, hidden] to `out` (float32), times `probs` [rows] where given.

    Each expert has the next of `counts` rows. In host memory the CPU's kernel for 16-bit weights computes all of them
    in one call, whichever lane asks; elsewhere the family's own math does, one by one.
    """
    chosen = [(part, count) for part, count in zip(parts, counts, strict=True) if count]
    if x.is_cpu and spec.dtype != "float32":
        experts = [expert_weights(ctx, family, spec, part) for part, _ in chosen]
        counts = [count for _, count in chosen]
        return kernels.expert_ffns(x, counts, experts, out, row_weights=probs, num_threads=ctx.num_threads())
    start = 0
    for part, count in chosen:
        mine = slice(start, start + count)
        out[mine] = family.expert(spec, weights(ctx, part), x[mine])
        start += count
    if probs is not None:
        out.mul_(probs[:, None])
