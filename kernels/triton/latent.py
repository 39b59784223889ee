"""Attend with one new token per sequence to latents on the device (DeepSeek-V2, arXiv 2405.04434 §2.1), staged there or
in a paged cache.

All heads read the same row of a token, so a program takes as many heads as a product of tensor cores has rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton import arguments as check
from kernels.triton.decode import LENGTHS_AT_ONCE, blocks_before
from kernels.triton.device import cdiv, chip, power_of_two, product, widens
from kernels.triton.prefill import LOG2_E
from kernels.triton.tiling import latent_tiles


@triton.jit(do_not_specialize_on_alignment=["positions", "blocks"])
def _attend_latents(
    q, cache, blocks, positions, out, q_stride, out_stride, block_stride, scale,
    NUM_HEADS: tl.constexpr, KV_RANK: tl.constexpr, ROPE_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANKS: tl.constexpr, ROPES: tl.constexpr, LENGTHS: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    """Attend with ROWS heads of one sequence. BLOCK_SIZE 0 means staged; `scale` contains log2(e).

    Latent and RoPE key are tiles of their own: together they are no power of two, and the latent is the value too.
    """
    TILES: tl.constexpr = (NUM_HEADS + ROWS - 1) // ROWS  # of one sequence: side by side, they find its rows in L2
    WIDTH: tl.constexpr = KV_RANK + ROPE_DIM
    sequence, tile = tl.program_id(0) // TILES, tl.program_id(0) % TILES
    length = tl.load(positions + sequence).to(tl.int32) + 1
    if BLOCK_SIZE == 0:
        rows = cache + blocks_before(positions, sequence, 1, LENGTHS) * WIDTH
    else:
        rows = cache
        own_blocks = blocks + blocks_before(positions, sequence, BLOCK_SIZE, LENGTHS)
    head, rank, rope = tile * ROWS + tl.arange(0, ROWS), tl.arange(0, RANKS), tl.arange(0, ROPES)
    is_head, is_rank, is_rope = head < NUM_HEADS, rank < KV_RANK, rope < ROPE_DIM
    q_at = q + sequence.to(tl.int64) * q_stride + head[:, None] * WIDTH
    latent_q = tl.load(q_at + rank[None, :], mask=is_head[:, None] & is_rank[None, :], other=0.0)
    rope_q = tl.load(q_at + KV_RANK + rope[None, :], mask=is_head[:, None] & is_rope[None, :], other=0.0)

    top = tl.zeros((ROWS,), tl.float32) - float("inf")
    total = tl.zeros((ROWS,), tl.float32)
    mixed = tl.zeros((ROWS, RANKS), tl.float32)
    for start in range(0, length, COLUMNS):
        key = start + tl.arange(0, COLUMNS)
        is_key = key < length
        if BLOCK_SIZE == 0:
            row = rows + key.to(tl.int64) * WIDTH
        else:
            block = tl.load(own_blocks + key // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
            row = rows + block * block_stride + (key % BLOCK_SIZE) * WIDTH
        latents = tl.load(row[:, None] + rank[None, :], mask=is_key[:, None] & is_rank[None, :], other=0.0)
        ropes = tl.load(row[None, :] + KV_RANK + rope[:, None], mask=is_key[None, :] & is_rope[:, None], other=0.0)
        scores = product(rope_q, ropes, tl.zeros((ROWS, COLUMNS), tl.float32), WIDEN)
        scores = product(latent_q, tl.trans(latents), scores, WIDEN) * scale
        scores = tl.where(is_key[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1))  # every step has a key: never -inf
        probs, shrink = tl.exp2(scores - new_top[:, None]), tl.exp2(top - new_top)
        total = total * shrink + tl.sum(probs, axis=1)
        mixed = product(probs.to(latents.dtype), latents, mixed * shrink[:, None], WIDEN)
        top = new_top
    result = mixed / total[:, None]
    out_at = out + sequence.to(tl.int64) * out_stride + head[:, None] * KV_RANK + rank[None, :]
    tl.store(out_at, result.to(out.dtype.element_ty), mask=is_head[:, None] & is_rank[None, :])


def staged_latent_attention(
    q: torch.Tensor, staging: torch.Tensor, positions: torch.Tensor, out: torch.Tensor, *, scale: float
) -> None:
    """Attend with one query token per sequence to latents that lie one sequence behind the other.

    q:         [seqs, heads, kv_rank + rope_dim], the part without RoPE times the key up-projection (absorbed), then
               the rotated part; may be strided in dim 0
    staging:   q's dtype, flat: for each sequence [context, kv_rank + rope_dim], the normed latent and the rotated key
    positions: int64 [seqs] of the query tokens; the context is position + 1 tokens, the query's own included
    out:       [seqs, heads, kv_rank] in q's dtype, to be multiplied by the value up-projection; may be strided in dim 0

    A head's score is its query times a token's whole row; its value is the row's first kv_rank numbers. `scale` is that
    of the uncompressed head, not of q's width. Where each sequence begins is found from the positions on the device.
    Softmax and sums are in float32. The caller sees to it that `staging` holds all contexts. Raises ValueError naming
    the argument.
    """
    check.floats("q", q, 3, strided=True)
    check.floats("staging", staging, 1)
    if staging.dtype is not q.dtype or staging.device != q.device:
        raise ValueError(f"staging: expected {q.dtype} on {q.device}, got {staging.dtype} on {staging.device}")
    _attend(q, staging, None, positions, out, 0, 0, scale)


def paged_latent_attention(
    q: torch.Tensor,
    cache: torch.Tensor,
    blocks: torch.Tensor,
    positions: torch.Tensor,
    out: torch.Tensor,
    *,
    scale: float,
) -> None:
    """Attend as `staged_latent_attention` does, over a paged cache in device memory that is laid out as the host's.

    cache:  [num_blocks, 1, block_size, kv_rank + rope_dim] in q's dtype; may be strided in dim 0
    blocks: int32, flat: the blocks of the first sequence's context, then those of the second, and so on; the caller
            sees to it that there are enough
    """
    check.floats("q", q, 3, strided=True)
    if cache.dim() != 4 or cache.shape[1] != 1:
        raise ValueError(f"cache: expected [blocks, 1, block_size, width], got {tuple(cache.shape)}")
    block_size, width = cache.shape[2:]
    if cache.dtype is not q.dtype or cache.device != q.device:
        raise ValueError(f"cache: expected {q.dtype} on {q.device}, got {cache.dtype} on {cache.device}")
    if width != q.shape[-1]:
        raise ValueError(f"cache: expected rows of {q.shape[-1]} numbers as q has, got {width}")
    if cache.stride()[2:] != (width, 1):
        raise ValueError(f"cache: expected contiguous blocks, got strides {cache.stride()}")
    check.tensor("blocks", blocks, (blocks.numel(),), torch.int32, q)
    _attend(q, cache, blocks, positions, out, block_size, cache.stride(0), scale)


def _attend(
    q: torch.Tensor,
    cache: torch.Tensor,
    blocks: torch.Tensor | None,
    positions: torch.Tensor,
    out: torch.Tensor,
    block_size: int,
    block_stride: int,
    scale: float,
) -> None:
    check.floats("out", out, 3, strided=True)
    num_seqs, num_heads, width = q.shape
    kv_rank = out.shape[2]
    if not 0 < kv_rank < width:
        raise ValueError(f"out: expected kv_rank from 1 to {width - 1} (less than q's width), got {kv_rank}")
    check.tensor("positions", positions, (num_seqs,), torch.int64, q)
    if out.shape[:2] != q.shape[:2] or out.dtype is not q.dtype or out.device != q.device:
        expected = f"{(num_seqs, num_heads, kv_rank)} {q.dtype} on {q.device}"
        raise ValueError(f"out: expected {expected}, got {tuple(out.shape)} {out.dtype} on {out.device}")
    if num_seqs == 0:
        return
    ranks, ropes = max(16, power_of_two(kv_rank)), max(16, power_of_two(width - kv_rank))
    tiles = latent_tiles(q.element_size(), ranks + ropes, num_heads, chip(q.device))
    _attend_latents[(num_seqs * cdiv(num_heads, tiles.rows),)](
        q, cache, q if blocks is None else blocks, positions, out, q.stride(0), out.stride(0), block_stride,
        scale * LOG2_E,
        NUM_HEADS=num_heads, KV_RANK=kv_rank, ROPE_DIM=width - kv_rank, BLOCK_SIZE=block_size, ROWS=tiles.rows,
        COLUMNS=tiles.columns, RANKS=ranks, ROPES=ropes, LENGTHS=LENGTHS_AT_ONCE, WIDEN=widens(q),
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
