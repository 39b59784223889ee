"""Decode attention over a paged KV cache."""

from __future__ import annotations

import torch

from kernels import _tensors as check
from kernels._extension import native

_MODES = {"float32": False, "bf16_round": True}


def decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    out: torch.Tensor,
    *,
    scale: float,
    sliding_window: int = 0,
    num_threads: int = 1,
    mode: str = "float32",
) -> None:
    """One query token per sequence against its cached keys and values, written to `out`.

    q, out:           [seqs, heads, head_dim]; may be strided in dim 0; `out` has q's dtype or float32
    k_cache, v_cache: [num_blocks, kv_heads, block_size, head_dim]; may be strided in dim 0; same dtype
    block_tables:     int32 [seqs, max_blocks]; entries outside the attended tokens are never read
    context_lens:     int32 [seqs]; cached tokens including the query's own; 0 gives zeros

    Query head h uses KV head h // (heads // kv_heads). A `sliding_window` above 0 attends to that many last tokens.
    Dot products and softmax accumulate in float32. `mode="bf16_round"` also rounds every dot product (scores before
    scaling, and outputs) to bfloat16, as MoE-Gen's Appendix B does to match a GPU.
    Raises ValueError naming the argument, also for a context length or a used block id out of range.
    """
    check.cpu("q", q, 3)
    check.cpu("k_cache", k_cache, 4)
    check.cpu("v_cache", v_cache, 4)
    check.cpu("block_tables", block_tables, 2)
    check.cpu("context_lens", context_lens, 1)
    check.cpu("out", out, 3)
    num_seqs, num_heads, head_dim = q.shape
    num_blocks, num_kv_heads, block_size, cache_dim = k_cache.shape
    max_blocks = block_tables.shape[1]
    if cache_dim != head_dim or head_dim == 0:
        raise ValueError(f"k_cache: expected head_dim {head_dim} as q has, got {cache_dim}")
    if num_kv_heads == 0 or num_heads % num_kv_heads:
        raise ValueError(f"k_cache: q's {num_heads} heads are no multiple of {num_kv_heads} KV heads")
    if block_size == 0:
        raise ValueError("k_cache: block_size is 0")
    check.shape("v_cache", v_cache, (num_blocks, num_kv_heads, block_size, head_dim))
    check.shape("block_tables", block_tables, (num_seqs, max_blocks))
    check.shape("context_lens", context_lens, (num_seqs,))
    check.shape("out", out, (num_seqs, num_heads, head_dim))

    q_code, out_code = check.float_code("q", q), check.float_code("out", out)
    kv_code = check.float_code("k_cache", k_cache)
    check.dtype("v_cache", v_cache, k_cache.dtype)
    check.dtype("block_tables", block_tables, torch.int32)
    check.dtype("context_lens", context_lens, torch.int32)
    if out_code not in (q_code, 2):
        raise ValueError(f"out: expected {q.dtype} as q has, or float32, got {out.dtype}")
    if sliding_window < 0:
        raise ValueError(f"sliding_window: expected 0 (off) or more, got {sliding_window}")
    if num_threads < 1:
        raise ValueError(f"num_threads: expected 1 or more, got {num_threads}")
    if mode not in _MODES:
        raise ValueError(f"mode: expected one of {', '.join(_MODES)}, got {mode!r}")

    q_stride, out_stride = check.rows("q", q), check.rows("out", out)
    k_stride, v_stride = check.rows("k_cache", k_cache), check.rows("v_cache", v_cache)
    table_stride = check.rows("block_tables", block_tables)
    check.contiguous("context_lens", context_lens)
    check.disjoint(
        "out",
        check.span_bytes(out),
        q=check.span_bytes(q),
        k_cache=check.span_bytes(k_cache),
        v_cache=check.span_bytes(v_cache),
        block_tables=check.span_bytes(block_tables),
        context_lens=check.span_bytes(context_lens),
    )
    native().decode_attention(
        q.data_ptr(), out.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), block_tables.data_ptr(),
        context_lens.data_ptr(), q_code, out_code, kv_code, num_seqs, num_heads, num_kv_heads, head_dim, num_blocks,
        block_size, max_blocks, q_stride, out_stride, k_stride, v_stride, table_stride, scale, sliding_window,
        _MODES[mode], num_threads,
    )  # fmt: skip
