"""Compute causal attention of prefilling sequences that lie one behind the other, all in one launch."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from kernels.triton import arguments as check
from kernels.triton.device import cdiv, chip, power_of_two, product, widens
from kernels.triton.tiling import prefill_tiles

LOG2_E = math.log2(math.e)


@triton.jit
def _within(there, AXIS: tl.constexpr, dim, DIM: tl.constexpr, DIMS: tl.constexpr):
    """Return the mask of what is `there` along the other axis and, where the dimension is padded, within it."""
    mask = tl.expand_dims(there, AXIS)
    if DIM != DIMS:
        mask = mask & tl.expand_dims(dim < DIM, 1 - AXIS)
    return mask


@triton.jit(do_not_specialize=["num_tokens", "window"], do_not_specialize_on_alignment=["positions"])
def _attend(
    q, k, v, positions, sinks, out, num_tokens, window, scale,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    HAS_SINKS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DIMS: tl.constexpr,
    VALUE_DIMS: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Attend with ROWS queries of one head. Row r at position p of its sequence sees rows r - p to r: positions say it
    all. Blocks go from the last, which have the most keys, to the first. `scale` contains log2(e)."""
    block, head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    kv_head = head // GROUP
    NUM_KV_HEADS: tl.constexpr = NUM_HEADS // GROUP
    row = block * ROWS + tl.arange(0, ROWS)
    is_row = row < num_tokens
    position = tl.load(positions + row, mask=is_row, other=0).to(tl.int32)
    first_key = tl.maximum(row - position, row - window + 1)
    dim, value_dim = tl.arange(0, DIMS), tl.arange(0, VALUE_DIMS)
    q_at = q + (row.to(tl.int64)[:, None] * NUM_HEADS + head) * HEAD_DIM + dim[None, :]
    queries = tl.load(q_at, mask=_within(is_row, 1, dim, HEAD_DIM, DIMS), other=0.0)

    if HAS_SINKS:  # one more logit of a value of zero
        top = tl.zeros((ROWS,), tl.float32) + tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
        total = tl.zeros((ROWS,), tl.float32) + 1.0
    else:
        top = tl.zeros((ROWS,), tl.float32) - float("inf")
        total = tl.zeros((ROWS,), tl.float32)
    mixed = tl.zeros((ROWS, VALUE_DIMS), tl.float32)
    begin = tl.maximum(tl.min(tl.where(is_row, first_key, num_tokens)), 0)
    for start in range(begin, tl.minimum((block + 1) * ROWS, num_tokens), COLUMNS):
        key = start + tl.arange(0, COLUMNS)
        is_key = key < num_tokens
        key_at = key.to(tl.int64) * NUM_KV_HEADS + kv_head
        keys = tl.load(
            k + key_at[None, :] * HEAD_DIM + dim[:, None], mask=_within(is_key, 0, dim, HEAD_DIM, DIMS), other=0.0
        )
        values = tl.load(
            v + key_at[:, None] * VALUE_DIM + value_dim[None, :],
            mask=_within(is_key, 1, value_dim, VALUE_DIM, VALUE_DIMS),
            other=0.0,
        )
        scores = product(queries, keys, tl.zeros((ROWS, COLUMNS), tl.float32), WIDEN) * scale
        seen = (key[None, :] >= first_key[:, None]) & (key[None, :] <= row[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)  # a row that has seen no key yet
        probs, shrink = tl.exp2(scores - base[:, None]), tl.exp2(top - base)
        total = total * shrink + tl.sum(probs, axis=1)
        mixed = product(probs.to(values.dtype), values, mixed * shrink[:, None], WIDEN)
        top = new_top
    out_at = out + (row.to(tl.int64)[:, None] * NUM_HEADS + head) * VALUE_DIM + value_dim[None, :]
    result = mixed / tl.where(is_row, total, 1.0)[:, None]
    tl.store(out_at, result.to(out.dtype.element_ty), mask=_within(is_row, 1, value_dim, VALUE_DIM, VALUE_DIMS))


def causal_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    out: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> None:
    """Attend inside each sequence and write the result to `out`; grouped queries share a KV head.

    q:         [tokens, heads, head_dim]; k [tokens, kv_heads, head_dim]; v [tokens, kv_heads, value_dim], one dtype
    positions: int64 [tokens], counted from 0 in each sequence, which starts where the position is 0
    out:       [tokens, heads, value_dim] in q's dtype
    window:    a token sees itself and the window - 1 tokens before it
    sinks:     [heads], one more logit a head that has no value (gpt-oss)

    No lengths are needed on the host: each block of queries walks from the first key any of its rows sees. Softmax and
    sums are in float32. Raises ValueError naming the argument.
    """
    check.floats("q", q, 3)
    check.floats("k", k, 3)
    check.floats("v", v, 3)
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, value_dim = v.shape[1:]
    if num_kv_heads == 0 or num_heads % num_kv_heads:
        raise ValueError(f"v: q's {num_heads} heads are no multiple of {num_kv_heads} KV heads")
    check.tensor("k", k, (num_tokens, num_kv_heads, head_dim), q.dtype, q)
    check.tensor("v", v, (num_tokens, num_kv_heads, value_dim), q.dtype, q)
    check.tensor("positions", positions, (num_tokens,), torch.int64, q)
    check.tensor("out", out, (num_tokens, num_heads, value_dim), q.dtype, q)
    check.window(window)
    if sinks is not None:
        check.tensor("sinks", sinks, (num_heads,), sinks.dtype, q)
    if num_tokens == 0:
        return
    dims, value_dims = max(16, power_of_two(head_dim)), max(16, power_of_two(value_dim))
    tiles = prefill_tiles(q.element_size(), max(dims, value_dims), chip(q.device))
    _attend[(cdiv(num_tokens, tiles.rows), num_heads)](
        q, k, v, positions, q if sinks is None else sinks, out, num_tokens, window or num_tokens, scale * LOG2_E,
        NUM_HEADS=num_heads, GROUP=num_heads // num_kv_heads, HEAD_DIM=head_dim, VALUE_DIM=value_dim,
        HAS_SINKS=sinks is not None, ROWS=tiles.rows, COLUMNS=tiles.columns, DIMS=dims, VALUE_DIMS=value_dims,
        WIDEN=widens(q), num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
