"""View the rows of queries, keys, values and results, which are those of heads or, where latents are cached, those of
latents.

Where a model caches latents, decoding tokens attend to these: queries are absorbed into the latents' space, and results
lie in it. Prompts do so too, or attend to keys and values that their own latents are expanded to
(`ModelSpec.expands_prefill`).
"""

from __future__ import annotations

from typing import Any

from torch import cat

from harness.engine.batch import MicroBatch
from harness.engine.ops.views import rows
from harness.machine.base import Context
from harness.memory.tiers import Buffer
from harness.model.families import LatentRows
from harness.model.spec import ModelSpec


def num_expanded(spec: ModelSpec, batch: MicroBatch) -> int:
    """Return how many rows, the first ones, attend to keys and values of heads of their own prompt. Those behind them
    attend to what is cached."""
    return batch.num_prefill_tokens if spec.expands_prefill else 0


def row_features(spec: ModelSpec, batch: MicroBatch) -> tuple[float, ...]:
    """Return what the ops next to attention cost a function of: the number of rows. Where prompts are expanded, but
    tokens that decode attend to latents, it is the number of each."""
    if spec.latent is None or not spec.expands_prefill:
        return (float(batch.num_tokens),)
    first = num_expanded(spec, batch)
    return (float(first), float(batch.num_tokens - first))


def value_up_flops(spec: ModelSpec, batch: MicroBatch) -> int:
    """Return the FLOPs by which results in the latents' space become values of heads, behind attention. The other rows'
    values are projected in front of it."""
    return 2 * (batch.num_tokens - num_expanded(spec, batch)) * spec.value_up_params


def cached_queries(ctx: Context, spec: ModelSpec, buffer: Buffer, n: int, row_dim: int) -> Any:
    """Return queries [n, heads, width] for attention over the cache; each is the beginning of a row of `row_dim`."""
    return rows(ctx, buffer, n, row_dim, spec.dtype)[:, : spec.cached_q_dim].view(n, spec.num_heads, -1)


def cached_results(ctx: Context, spec: ModelSpec, buffer: Buffer, n: int, row_dim: int) -> Any:
    """Return the places of results [n, heads, width] of attention over the cache."""
    return rows(ctx, buffer, n, row_dim, spec.dtype)[:, : spec.cached_o_dim].view(n, spec.num_heads, -1)


def keys_and_values(spec: ModelSpec, pieces: Any) -> tuple[Any, Any]:
    """Return keys and values from the pieces of a cache. Whole latents are the keys, and their first `kv_rank` numbers
    the values."""
    if spec.latent is None:
        k, v = pieces
        return k, v
    [latent] = pieces
    return latent, latent[..., : spec.latent.kv_rank]


def prompt_rows(ctx: Context, op: Any) -> tuple[Any, Any, Any]:
    """Return queries, keys and values of the prompts' tokens, each [tokens, heads, width]. Those of heads are dense,
    though narrower than the rows of queries over the cache. `op` has `spec`, `acts` and `batch`."""
    spec, acts, first = op.spec, op.acts, op.batch.num_prefill_tokens
    if spec.expands_prefill:
        q = ctx.tensor(acts.q, (first, spec.num_heads, spec.head_dim), spec.dtype)
        k = ctx.tensor(acts.k, (first, spec.num_kv_heads, spec.head_dim), spec.dtype)
        return q, k, ctx.tensor(acts.v, (first, spec.num_kv_heads, spec.value_dim), spec.dtype)
    q = cached_queries(ctx, spec, acts.q, first, spec.q_row_dim)
    latent = ctx.tensor(acts.latent, (first, 1, spec.kv_pieces[0].width), spec.dtype)
    return q, *keys_and_values(spec, [latent])


def prompt_results(ctx: Context, op: Any) -> Any:
    """Return the places of results [tokens, heads, width] that belong to `prompt_rows`."""
    spec, first = op.spec, op.batch.num_prefill_tokens
    if spec.expands_prefill:
        return ctx.tensor(op.acts.attention, (first, spec.num_heads, spec.value_dim), spec.dtype)
    return cached_results(ctx, spec, op.acts.attention, first, spec.o_row_dim)


def keep_latents(ctx: Context, op: Any, found: LatentRows) -> None:
    """Copy what a family computed in front of attention over latents into the buffers of `op`, which has `spec`, `acts`
    and `batch`."""
    spec, acts, n = op.spec, op.acts, op.batch.num_tokens
    first = num_expanded(spec, op.batch)
    rows(ctx, acts.latent, n, spec.kv_pieces[0].dim, spec.dtype).copy_(found.latent)
    cached_queries(ctx, spec, acts.q, n, spec.q_row_dim)[first:].copy_(found.absorbed)
    if first:
        for target, source in zip(prompt_rows(ctx, op), (found.q, found.k, found.v), strict=True):
            target.copy_(source)


def attended(ctx: Context, op: Any, weights: dict[str, Any]) -> Any:
    """Return the attention results of all heads, [tokens, heads * value_dim], with those in the latents' space brought
    out of it. `op` has `family`, `spec`, `acts`, `batch` and `layer`."""
    spec, n = op.spec, op.batch.num_tokens
    if spec.latent is None:
        return rows(ctx, op.acts.attention, n, spec.o_dim, spec.dtype)
    first = num_expanded(spec, op.batch)
    expanded = rows(ctx, op.acts.attention, first, spec.o_dim, spec.dtype)
    if first == n:
        return expanded
    found = rows(ctx, op.acts.attention, n, spec.o_row_dim, spec.dtype)[first:, : spec.cached_o_dim]
    values = op.family.from_latents(spec, weights, found, op.layer)
    return cat((expanded, values)) if first else values
