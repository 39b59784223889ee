"""Ops take these torch views of planned buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import kernels
from harness.engine.batch import KvReads
from harness.engine.ops import on_gpu
from harness.machine.base import Context
from harness.memory.placed import PlacedPart
from harness.memory.tiers import Buffer
from harness.model.families import MoeInput
from harness.model.spec import ModelSpec


def weights(ctx: Context, part: PlacedPart) -> dict[str, Any]:
    """Return the part's tensors by local name; views are made once for each place and all parts of a form there."""
    memo, key = ctx.memo(part.buffer), (part.buffer, part.layout.form)
    if key not in memo:
        memo[key] = _weight_views(ctx, part)
    views: dict[str, Any] = memo[key]
    return views


def attention_weights(ctx: Context, part: PlacedPart | None) -> dict[str, Any]:
    """Return the weights that a layer's attention itself uses, by local name; most families have none."""
    return weights(ctx, part) if part else {}


def matrices(ctx: Context, family: Any, spec: ModelSpec, part: PlacedPart) -> tuple[Any, tuple[int, ...]]:
    """Return an expert's `ExpertShape` and the addresses of its matrices; both are made once for each place and all
    experts of a form there."""
    memo, key = ctx.memo(part.buffer), ("matrices", part.buffer, part.layout.form)
    if key not in memo:
        expert = family.expert_matrices(spec, weights(ctx, part))
        memo[key] = (expert.shape, expert.addresses)
    found: tuple[Any, tuple[int, ...]] = memo[key]
    return found


def expert_weights(ctx: Context, family: Any, spec: ModelSpec, part: PlacedPart) -> kernels.ExpertWeights:
    """Return an expert's 16-bit matrices for the CPU's kernels; they are checked once for each place and all experts of
    a form there. With biases it is once for each place and expert: of these the kernels keep float32 copies."""
    which = id(part.layout) if spec.expert_bias else part.layout.form
    memo, key = ctx.memo(part.buffer), ("expert", part.buffer, which)
    if key not in memo:
        m = family.expert_matrices(spec, weights(ctx, part))
        gating = kernels.Gating(
            activation=m.activation.name,
            alpha=m.activation.alpha,
            limit=m.activation.limit,
            gate_bias=m.gate_bias,
            up_bias=m.up_bias,
            down_bias=m.down_bias,
        )
        memo[key] = (part.layout, kernels.ExpertWeights(m.gate, m.up, m.down, gating))  # a layout in use keeps its id
    found: kernels.ExpertWeights = memo[key][1]
    return found


def _weight_views(ctx: Context, part: PlacedPart) -> dict[str, Any]:
    raw = ctx.tensor(part.buffer, (part.layout.nbytes,), "uint8")
    kinds = {t.dtype: ctx.tensor(part.buffer, (0,), t.dtype).dtype for t in part.layout.tensors}
    return {
        t.name: raw[t.offset_bytes : t.offset_bytes + t.nbytes].view(kinds[t.dtype]).view(t.shape)
        for t in part.layout.tensors
    }


def rows(ctx: Context, buffer: Buffer, num_rows: int, width: int, dtype: str) -> Any:
    """Return a [num_rows, width] view."""
    return ctx.tensor(buffer, (num_rows, width), dtype)


def attend_each(reads: KvReads, q: Any, out: Any, attend: Callable[[Any, Any], None]) -> None:
    """Call `attend` with a query and a place for its result for each entry of `reads`; results of shadows are dropped.

    q is [rows, heads, head_dim]; out is [rows, ...].
    """
    if not reads.num_shadows:
        return attend(q, out)
    found = out.new_empty((len(reads.lens), *out.shape[1:]))
    attend(q.index_select(0, on_gpu.numbers(reads.queries, q.device)), found)
    out.copy_(found[: reads.num_rows])


def keep(ctx: Context, op: Any, found: MoeInput) -> None:
    """Copy what lies between attention and experts into the buffers of `op`, which has `spec`, `acts` and `batch`.
    `moe_out` begins with the outputs that all tokens get."""
    spec, acts, n = op.spec, op.acts, op.batch.num_tokens
    assert found.common is None or spec.has_common_mlp(op.layer), "the spec knows of no MLP for all tokens"
    rows(ctx, acts.hidden, n, spec.hidden_dim, spec.dtype).copy_(found.residual)
    rows(ctx, acts.normed, n, spec.hidden_dim, spec.dtype).copy_(found.normed)
    if found.expert_ids is not None:
        rows(ctx, acts.expert_ids, n, spec.experts_per_token, "int64").copy_(found.expert_ids)
        rows(ctx, acts.expert_weights, n, spec.experts_per_token, "float32").copy_(found.expert_weights)
    moe_out = rows(ctx, acts.moe_out, n, spec.hidden_dim, "float32")
    moe_out.zero_() if found.common is None else moe_out.copy_(found.common)


def all_rows(ctx: Context, buffer: Buffer, spec: ModelSpec, dtype: str) -> Any:
    """Return a view of as many rows [n, hidden] as a buffer holds, in float32 or the model's dtype."""
    number_bytes = 4 if dtype == "float32" else spec.dtype_bytes
    return rows(ctx, buffer, buffer.nbytes // (spec.hidden_dim * number_bytes), spec.hidden_dim, dtype)
