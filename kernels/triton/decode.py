"""Attend with one new token per sequence to its keys and values on the device, staged there or in a paged cache.

Where sequences and KV heads are fewer than a GPU has room for, several programs share a context: each attends to a run
of its keys, and `_join` puts their parts together, in order, by what each has seen as its largest score.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton import arguments as check
from kernels.triton.device import chip, power_of_two, product, widens
from kernels.triton.prefill import LOG2_E
from kernels.triton.tiling import decode_splits, decode_tiles

LENGTHS_AT_ONCE = 128  # earlier sequences whose contexts a program adds up at once


@triton.jit
def blocks_before(positions, row, BLOCK_SIZE: tl.constexpr, LENGTHS: tl.constexpr):
    """Count the blocks in the contexts of all sequences before `row`."""
    total = tl.zeros((), tl.int64)
    for first in range(0, row, LENGTHS):
        earlier = first + tl.arange(0, LENGTHS)
        total += tl.sum((tl.load(positions + earlier, mask=earlier < row, other=-1) + BLOCK_SIZE) // BLOCK_SIZE)
    return total


@triton.jit
def _begin(
    k_cache, v_cache, blocks, positions, sequence, kv_head, length,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, LENGTHS: tl.constexpr,
):  # fmt: skip
    """Return where the keys and values of one sequence and KV head begin, and the numbers of the sequence's blocks."""
    if BLOCK_SIZE == 0:
        staged = blocks_before(positions, sequence, 1, LENGTHS) * (2 * NUM_KV_HEADS * HEAD_DIM)
        own_blocks = blocks
        k_base = k_cache + staged + kv_head.to(tl.int64) * length * HEAD_DIM
        v_base = v_cache + staged + (NUM_KV_HEADS + kv_head).to(tl.int64) * length * HEAD_DIM
    else:
        own_blocks = blocks + blocks_before(positions, sequence, BLOCK_SIZE, LENGTHS)
        k_base = k_cache + kv_head * BLOCK_SIZE * HEAD_DIM
        v_base = v_cache + kv_head * BLOCK_SIZE * HEAD_DIM
    return k_base, v_base, own_blocks


@triton.jit(do_not_specialize=["window", "splits"], do_not_specialize_on_alignment=["positions", "blocks"])
def _attend(
    q, k_cache, v_cache, blocks, positions, sinks, out, parts, sums, window, splits, k_stride, v_stride, scale,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HAS_SINKS: tl.constexpr, IS_SPLIT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DIMS: tl.constexpr,
    LENGTHS: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Attend with one sequence's query heads of one KV head. BLOCK_SIZE 0 means staged; `scale` contains log2(e).

    With IS_SPLIT each of `splits` programs takes a run of whole steps, maybe none. Instead of the result it writes its
    unnormalised part, with its largest score and its sum.
    """
    sequence, kv_head = tl.program_id(0), tl.program_id(1)
    length = tl.load(positions + sequence).to(tl.int32) + 1
    k_base, v_base, own_blocks = _begin(
        k_cache, v_cache, blocks, positions, sequence, kv_head, length, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, LENGTHS
    )
    member, dim = tl.arange(0, ROWS), tl.arange(0, DIMS)
    head = kv_head * GROUP + member
    is_head, is_dim = member < GROUP, dim < HEAD_DIM
    at = (sequence.to(tl.int64) * NUM_KV_HEADS * GROUP + head)[:, None] * HEAD_DIM + dim[None, :]
    queries = tl.load(q + at, mask=is_head[:, None] & is_dim[None, :], other=0.0)

    begin, end = tl.maximum(length - window, 0), length
    if IS_SPLIT:
        split = tl.program_id(2)
        run = tl.cdiv(tl.cdiv(length - begin, COLUMNS), splits) * COLUMNS
        begin += split * run
        end = tl.minimum(begin + run, length)
    if HAS_SINKS:  # one more logit of a value of zero
        top = tl.load(sinks + head, mask=is_head, other=0.0).to(tl.float32) * 1.4426950408889634
        total = tl.zeros((ROWS,), tl.float32) + 1.0
        if IS_SPLIT:  # which counts once
            top = tl.where(split == 0, top, float("-inf"))
            total = tl.where(split == 0, total, 0.0)
    else:
        top = tl.zeros((ROWS,), tl.float32) - float("inf")
        total = tl.zeros((ROWS,), tl.float32)
    mixed = tl.zeros((ROWS, DIMS), tl.float32)
    for start in range(begin, end, COLUMNS):
        key = start + tl.arange(0, COLUMNS)
        is_key = key < end
        if BLOCK_SIZE == 0:
            k_at = key.to(tl.int64) * HEAD_DIM
            v_at = k_at
        else:
            block = tl.load(own_blocks + key // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
            inside = (key % BLOCK_SIZE) * HEAD_DIM
            k_at, v_at = block * k_stride + inside, block * v_stride + inside
        keys = tl.load(k_base + k_at[None, :] + dim[:, None], mask=is_key[None, :] & is_dim[:, None], other=0.0)
        values = tl.load(v_base + v_at[:, None] + dim[None, :], mask=is_key[:, None] & is_dim[None, :], other=0.0)
        scores = product(queries, keys, tl.zeros((ROWS, COLUMNS), tl.float32), WIDEN) * scale
        scores = tl.where(is_key[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1))  # every step has a key: never -inf
        probs, shrink = tl.exp2(scores - new_top[:, None]), tl.exp2(top - new_top)
        total = total * shrink + tl.sum(probs, axis=1)
        mixed = product(probs.to(values.dtype), values, mixed * shrink[:, None], WIDEN)
        top = new_top
    if IS_SPLIT:
        part = (sequence.to(tl.int64) * splits + split) * NUM_KV_HEADS * GROUP + head
        part_at = part[:, None] * HEAD_DIM + dim[None, :]
        tl.store(parts + part_at, mixed, mask=is_head[:, None] & is_dim[None, :])
        tl.store(sums + part * 2, top, mask=is_head)
        tl.store(sums + part * 2 + 1, total, mask=is_head)
    else:
        result = mixed / total[:, None]
        tl.store(out + at, result.to(out.dtype.element_ty), mask=is_head[:, None] & is_dim[None, :])


@triton.jit(do_not_specialize=["splits"])
def _join(parts, sums, out, splits, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr):
    """Put the parts of one sequence's head together; a part without keys has -inf as its largest score."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    dim = tl.arange(0, DIMS)
    is_dim = dim < HEAD_DIM
    top = tl.zeros((), tl.float32) - float("inf")
    total = tl.zeros((), tl.float32)
    mixed = tl.zeros((DIMS,), tl.float32)
    for split in range(0, splits):
        part = (sequence.to(tl.int64) * splits + split) * NUM_HEADS + head
        its_top, its_total = tl.load(sums + part * 2), tl.load(sums + part * 2 + 1)
        new_top = tl.maximum(top, its_top)  # the first part has keys: never -inf
        shrink, share = tl.exp2(top - new_top), tl.exp2(its_top - new_top)
        its_mixed = tl.load(parts + part * HEAD_DIM + dim, mask=is_dim, other=0.0)
        total = total * shrink + its_total * share
        mixed = mixed * shrink + its_mixed * share
        top = new_top
    at = (sequence.to(tl.int64) * NUM_HEADS + head) * HEAD_DIM + dim
    tl.store(out + at, (mixed / total).to(out.dtype.element_ty), mask=is_dim)


def staged_decode_attention(
    q: torch.Tensor,
    staging: torch.Tensor,
    positions: torch.Tensor,
    out: torch.Tensor,
    *,
    num_kv_heads: int,
    scale: float,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    splits: int | None = None,
) -> None:
    """Attend with one query token per sequence to keys and values that lie one sequence behind the other.

    q, out:    [seqs, heads, head_dim]
    staging:   q's dtype, flat: for each sequence keys [kv_heads, context, head_dim], then its values
    positions: int64 [seqs] of the query tokens; the context is position + 1 tokens, the query's own included
    window:    a token sees itself and the window - 1 tokens before it
    sinks:     [heads], one more logit a head that has no value (gpt-oss)
    splits:    programs that share a context; None: as many as the GPU has room for. Above 1 they leave float32 parts,
               [seqs, splits, heads, head_dim + 2], in memory of torch's allocator

    Where each sequence begins is found from the positions on the device. Softmax and sums are in float32. The caller
    sees to it that `staging` holds all contexts. Raises ValueError naming the argument.
    """
    check.floats("staging", staging, 1)
    _decode(q, staging, staging, None, positions, out, num_kv_heads, 0, (0, 0), scale, window, sinks, splits)


def paged_decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    blocks: torch.Tensor,
    positions: torch.Tensor,
    out: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    splits: int | None = None,
) -> None:
    """Attend as `staged_decode_attention` does, over a paged cache in device memory that is laid out as the host's.

    k_cache, v_cache: [num_blocks, kv_heads, block_size, head_dim] in q's dtype; may be strided in dim 0
    blocks:           int32, flat: the blocks of the first sequence's context, then those of the second, and so on;
                      the caller sees to it that there are enough
    """
    _, num_kv_heads, block_size, head_dim = k_cache.shape
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache.shape != k_cache.shape or cache.dtype is not q.dtype or cache.device != q.device:
            raise ValueError(f"{name}: expected {tuple(k_cache.shape)} {q.dtype}, got {tuple(cache.shape)}")
        if cache.stride()[1:] != (block_size * head_dim, head_dim, 1):
            raise ValueError(f"{name}: expected contiguous blocks, got strides {cache.stride()}")
    if head_dim != q.shape[-1]:
        raise ValueError(f"k_cache: expected head_dim {q.shape[-1]} as q has, got {head_dim}")
    check.tensor("blocks", blocks, (blocks.numel(),), torch.int32, q)
    strides = (k_cache.stride(0), v_cache.stride(0))
    options = (scale, window, sinks, splits)
    _decode(q, k_cache, v_cache, blocks, positions, out, num_kv_heads, block_size, strides, *options)


def _decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    blocks: torch.Tensor | None,
    positions: torch.Tensor,
    out: torch.Tensor,
    num_kv_heads: int,
    block_size: int,
    strides: tuple[int, int],
    scale: float,
    window: int | None,
    sinks: torch.Tensor | None,
    splits: int | None,
) -> None:
    check.floats("q", q, 3)
    num_seqs, num_heads, head_dim = q.shape
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(f"num_kv_heads: q's {num_heads} heads are no multiple of {num_kv_heads}")
    check.tensor("positions", positions, (num_seqs,), torch.int64, q)
    check.tensor("out", out, (num_seqs, num_heads, head_dim), q.dtype, q)
    check.window(window)
    if sinks is not None:
        check.tensor("sinks", sinks, (num_heads,), sinks.dtype, q)
    if k_cache.dtype is not q.dtype or k_cache.device != q.device:
        raise ValueError(f"keys: expected {q.dtype} on {q.device}, got {k_cache.dtype} on {k_cache.device}")
    if splits is not None and splits < 1:
        raise ValueError(f"splits: expected at least 1, got {splits}")
    if num_seqs == 0:
        return
    group, dims = num_heads // num_kv_heads, max(16, power_of_two(head_dim))
    its_chip = chip(q.device)
    tiles = decode_tiles(q.element_size(), dims, group, its_chip)
    splits = splits or decode_splits(num_seqs * num_kv_heads, its_chip)
    parts = sums = out
    if splits > 1:
        rows = num_seqs * splits * num_heads
        parts, sums = (torch.empty(rows * width, dtype=torch.float32, device=q.device) for width in (head_dim, 2))
    _attend[(num_seqs, num_kv_heads, splits)](
        q, k_cache, v_cache, q if blocks is None else blocks, positions, q if sinks is None else sinks,
        out, parts, sums, window or 2**31 - 1, splits, *strides, scale * LOG2_E,
        NUM_KV_HEADS=num_kv_heads, GROUP=group, HEAD_DIM=head_dim, BLOCK_SIZE=block_size, HAS_SINKS=sinks is not None,
        IS_SPLIT=splits > 1, ROWS=tiles.rows, COLUMNS=tiles.columns, DIMS=dims, LENGTHS=LENGTHS_AT_ONCE,
        WIDEN=widens(q), num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    if splits > 1:
        _join[(num_seqs, num_heads)](
            parts, sums, out, splits, NUM_HEADS=num_heads, HEAD_DIM=head_dim, DIMS=dims, num_warps=1
        )
