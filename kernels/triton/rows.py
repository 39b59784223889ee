"""Compute what belongs to each row of a pass beside the products: norms, rotary embedding, and rows kept in a cache.

One launch each, where torch needs up to a dozen: for few tokens the host takes longer to launch than the device to
run (attention's inputs of 16 tokens of Mixtral-8x7B on an H200: 1.2 ms and 0.11). Every step rounds as the model's own.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton import arguments as check
from kernels.triton.device import cdiv, power_of_two

_NUMBERS = 4096  # of heads that one program rotates or keeps at once


@triton.jit(do_not_specialize=["count", "inner", "stride", "inner_stride"])
def _norm(
    x, weight, out, count, inner, stride, inner_stride, eps,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, IS_ALIGNED: tl.constexpr,
):  # fmt: skip
    """Divide ROWS rows by their root mean square in float32, round, and multiply by the weight."""
    kind: tl.constexpr = out.dtype.element_ty
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    at = (row // inner).to(tl.int64) * stride + (row % inner).to(tl.int64) * inner_stride
    if IS_ALIGNED:
        at = tl.multiple_of(at, 16)
    mask = (row < count)[:, None] & (column < WIDTH)[None, :]
    wide = tl.load(x + at[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=1) / WIDTH + eps)
    normed = (wide * scale[:, None]).to(kind).to(tl.float32)
    scaled = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)[None, :] * normed
    tl.store(out + row.to(tl.int64)[:, None] * WIDTH + column[None, :], scaled.to(kind), mask=mask)


@triton.jit
def _turn(
    x, out, cos, sin, token, stride, first_head,
    NUM_HEADS: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Rotate the pairs (i, i + HALF) of HEADS heads of one token; cos and sin are [COLUMNS] in float32."""
    kind: tl.constexpr = out.dtype.element_ty
    head, column = first_head + tl.arange(0, HEADS), tl.arange(0, COLUMNS)
    mask = (head < NUM_HEADS)[:, None] & (column < HALF)[None, :]
    inside = head[:, None] * (2 * HALF) + column[None, :]
    source = x + token * stride + inside
    first = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=mask, other=0.0).to(tl.float32)
    begin = (first * cos[None, :]).to(kind).to(tl.float32) - (second * sin[None, :]).to(kind).to(tl.float32)
    end = (second * cos[None, :]).to(kind).to(tl.float32) + (first * sin[None, :]).to(kind).to(tl.float32)
    target = out + token * (NUM_HEADS * 2 * HALF) + inside
    tl.store(target, begin.to(kind), mask=mask)
    tl.store(target + HALF, end.to(kind), mask=mask)


@triton.jit(do_not_specialize=["q_stride", "k_stride"], do_not_specialize_on_alignment=["positions"])
def _rotate(
    q, k, positions, cos, sin, q_out, k_out, q_stride, k_stride,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Rotate HEADS heads of one token: the programs of a token take its queries in turn, then its keys."""
    q_programs: tl.constexpr = (Q_HEADS + HEADS - 1) // HEADS
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, COLUMNS)
    at = tl.load(positions + token) * HALF + column
    c = tl.load(cos + at, mask=column < HALF, other=0.0).to(tl.float32)
    s = tl.load(sin + at, mask=column < HALF, other=0.0).to(tl.float32)
    if part < q_programs:
        _turn(q, q_out, c, s, token, q_stride, part * HEADS, Q_HEADS, HALF, HEADS, COLUMNS)
    else:
        _turn(k, k_out, c, s, token, k_stride, (part - q_programs) * HEADS, K_HEADS, HALF, HEADS, COLUMNS)


@triton.jit(do_not_specialize=["stride"], do_not_specialize_on_alignment=["new", "slots"])
def _append(
    new, slots, cache, stride,
    NUM_HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write HEADS heads of one token to its slot."""
    token = tl.program_id(0).to(tl.int64)
    head, column = tl.program_id(1) * HEADS + tl.arange(0, HEADS), tl.arange(0, COLUMNS)
    mask = (head < NUM_HEADS)[:, None] & (column < WIDTH)[None, :]
    slot = tl.load(slots + token)
    rows = tl.load(new + (token * NUM_HEADS + head)[:, None] * WIDTH + column[None, :], mask=mask)
    inside = (head * BLOCK_SIZE + slot % BLOCK_SIZE)[:, None] * WIDTH + column[None, :]
    tl.store(cache + slot // BLOCK_SIZE * stride + inside, rows, mask=mask)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Divide x by the root of its mean square over the last dimension, in float32, round to x's dtype, and multiply by
    the weight.

    x:      [rows, width] or [tokens, heads, width], the last dimension contiguous
    weight: [width] in x's dtype

    Returns a contiguous tensor like x. Raises ValueError naming the argument.
    """
    width = weight.numel()
    if x.dim() not in (2, 3) or x.shape[-1] != width or (width > 1 and x.stride(-1) != 1):
        raise ValueError(f"x: expected [..., {width}] with contiguous rows, got {tuple(x.shape)}, {x.stride()}")
    check.floats("x", x[:0, ..., :0], x.dim())
    check.tensor("weight", weight, (width,), x.dtype, x)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    count = out.numel() // width if width else 0
    if count == 0:
        return out
    inner, inner_stride = (x.shape[1], x.stride(1)) if x.dim() == 3 else (1, 0)
    columns = power_of_two(width)
    rows = max(1, _NUMBERS // columns) if inner > 1 else 1
    is_aligned = x.stride(0) % 16 == inner_stride % 16 == x.data_ptr() % 16 == 0
    _norm[(cdiv(count, rows),)](
        x, weight, out, count, inner, x.stride(0), inner_stride, eps, WIDTH=width, COLUMNS=columns, ROWS=rows,
        IS_ALIGNED=is_aligned, num_warps=8 if columns > 2048 else 4,
    )  # fmt: skip
    return out


def rotate(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate queries and keys by their tokens' positions: pairs (i, i + head_dim / 2) of each head.

    q, k:      [tokens, heads, head_dim], a token's heads contiguous
    positions: int64 [tokens]; cos, sin: [positions, 1, head_dim / 2] in q's dtype

    Products are rounded to that dtype before they are added. Returns contiguous (q, k). Raises ValueError naming the
    argument.
    """
    num_tokens, q_heads, head_dim = q.shape
    half, k_heads = head_dim // 2, k.shape[1]
    for name, x in (("q", q), ("k", k)):
        check.floats(name, x, 3, strided=True)
        if x.shape != (num_tokens, x.shape[1], 2 * half) or x.dtype is not q.dtype:
            raise ValueError(f"{name}: expected [{num_tokens}, heads, {2 * half}] {q.dtype}, got {tuple(x.shape)}")
    check.tensor("positions", positions, (num_tokens,), torch.int64, q)
    for name, table in (("cos", cos), ("sin", sin)):
        check.tensor(name, table, (len(cos), 1, half), q.dtype, q)
    rotated = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k)]
    if num_tokens == 0 or half == 0:
        return rotated[0], rotated[1]
    columns = power_of_two(half)
    heads = min(power_of_two(max(q_heads, k_heads)), max(1, _NUMBERS // columns))
    _rotate[(num_tokens, cdiv(q_heads, heads) + cdiv(k_heads, heads))](
        q, k, positions, cos, sin, *rotated, q.stride(0), k.stride(0), Q_HEADS=q_heads, K_HEADS=k_heads, HALF=half,
        HEADS=heads, COLUMNS=columns, enable_fp_fusion=False,  # else the compiler leaves a product unrounded
    )  # fmt: skip
    return rotated[0], rotated[1]


def append_rows(new: torch.Tensor, slots: torch.Tensor, cache: torch.Tensor) -> None:
    """Write rows of new tokens into a paged cache.

    new:   [tokens, heads, width] in the cache's dtype, contiguous
    slots: int64 [tokens]: block * block_size + place inside the block
    cache: [num_blocks, heads, block_size, width], may be strided in dim 0

    Slots are not looked at here. Raises ValueError naming the argument.
    """
    _, num_heads, block_size, width = cache.shape
    if cache.stride()[1:] != (block_size * width, width, 1):
        raise ValueError(f"cache: expected contiguous blocks, got strides {cache.stride()}")
    num_tokens = len(new)
    check.tensor("new", new, (num_tokens, num_heads, width), cache.dtype, cache)
    check.tensor("slots", slots, (num_tokens,), torch.int64, cache)
    if new.numel() == 0:
        return
    columns = power_of_two(width)
    heads = min(power_of_two(num_heads), max(1, _NUMBERS // columns))
    _append[(num_tokens, cdiv(num_heads, heads))](
        new, slots, cache, cache.stride(0), NUM_HEADS=num_heads, WIDTH=width, BLOCK_SIZE=block_size, HEADS=heads,
        COLUMNS=columns,
    )  # fmt: skip
