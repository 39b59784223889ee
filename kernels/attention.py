"""Compute decode attention over a paged KV cache, and latent attention over a compressed one."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels import _options
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
    sinks: torch.Tensor | None = None,
    num_threads: int = 1,
    mode: str = "float32",
) -> None:
    """Attend with one query token per sequence to its cached keys and values, and write the result to `out`.

    q, out:           [seqs, heads, head_dim]; may be strided in dim 0; `out` has q's dtype or float32
    k_cache, v_cache: [num_blocks, kv_heads, block_size, head_dim]; may be strided in dim 0; same dtype
    block_tables:     int32 [seqs, max_blocks]; entries outside the attended tokens are never read
    context_lens:     int32 [seqs]; cached tokens including the query's own; 0 gives zeros
    sinks:            float32 [heads], one more logit a head that has no value (gpt-oss)

    Query head h uses KV head h // (heads // kv_heads). A `sliding_window` above 0 attends to that many last tokens.
    Dot products and softmax accumulate in float32. `mode="bf16_round"` also rounds every dot product (scores before
    scaling, and outputs) to bfloat16, as MoE-Gen's Appendix B does to match a GPU. `num_threads` above 1 uses a pool
    of the process. Raises ValueError or TypeError naming the argument, also for a context length or a used block id out
    of range.
    """
    check.cpu("q", q, 3)
    check.cpu("k_cache", k_cache, 4)
    check.cpu("v_cache", v_cache, 4)
    check.cpu("out", out, 3)
    _, num_heads, head_dim = q.shape
    num_blocks, num_kv_heads, block_size, cache_dim = k_cache.shape
    if cache_dim != head_dim or head_dim == 0:
        raise ValueError(f"k_cache: expected head_dim {head_dim} as q has, got {cache_dim}")
    if num_kv_heads == 0 or num_heads % num_kv_heads:
        raise ValueError(f"k_cache: q's {num_heads} heads are no multiple of {num_kv_heads} KV heads")
    check.shape("v_cache", v_cache, (num_blocks, num_kv_heads, block_size, head_dim))
    check.dtype("v_cache", v_cache, k_cache.dtype)
    values = _Rows("v_cache", v_cache, check.rows("v_cache", v_cache), head_dim)
    options = _Options(scale, sliding_window, sinks, mode, num_threads)
    _decode(q, "k_cache", k_cache, values, block_tables, context_lens, out, options)


def latent_attention(
    q: torch.Tensor,
    cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    out: torch.Tensor,
    *,
    scale: float,
    num_threads: int = 1,
    mode: str = "float32",
) -> None:
    """Compute multi-head latent attention (DeepSeek-V2 and V3, Moonlight) in the compressed space.

    q:     [seqs, heads, latent_dim + rope_dim], the no-rope query times the key up-projection (absorbed), then the
           rotated rope part; may be strided in dim 0
    cache: [num_blocks, block_size, latent_dim + rope_dim], the normed latent and the rotated key; strided in dim 0 too
    out:   [seqs, heads, latent_dim] in q's dtype or float32, to be multiplied by the value up-projection

    Each head's score is its q times the whole cached row, its value the row's first latent_dim elements. The rest is as
    in `decode_attention`. `scale` is that of the uncompressed head (no-rope plus rope dimension), not of q's.
    """
    check.cpu("q", q, 3)
    check.cpu("cache", cache, 3)
    check.cpu("out", out, 3)
    if cache.shape[2] != q.shape[2]:
        raise ValueError(f"cache: expected rows of {q.shape[2]} elements as q has, got {cache.shape[2]}")
    if not 0 < out.shape[2] <= q.shape[2]:
        raise ValueError(f"out: expected latent_dim from 1 to {q.shape[2]} (q's dimension), got {out.shape[2]}")
    block_stride = check.rows("cache", cache)
    check.spans(cache=cache)  # torch makes no view of a freed one
    keys = cache.unsqueeze(1)
    values = _Rows("cache", keys, block_stride, out.shape[2])
    options = _Options(scale, 0, None, mode, num_threads)
    _decode(q, "cache", keys, values, block_tables, context_lens, out, options)


def staged_attention(
    q: torch.Tensor,
    staging: torch.Tensor,
    context_lens: torch.Tensor,
    out: torch.Tensor,
    *,
    num_kv_heads: int,
    scale: float,
    sliding_window: int = 0,
    sinks: torch.Tensor | None = None,
    num_threads: int = 1,
    mode: str = "float32",
) -> None:
    """Attend as `decode_attention` does, to sequences that `kv_gather` left one after another.

    staging: [tokens of all sequences * 2 * kv_heads * head_dim]; of each sequence its keys, then its values, each
             [kv_heads, context, head_dim]
    """
    check.cpu("q", q, 3)
    _, num_heads, head_dim = q.shape
    if num_kv_heads < 1 or num_heads % num_kv_heads or not head_dim:
        raise ValueError(f"num_kv_heads: q's {num_heads} heads are no multiple of {num_kv_heads} KV heads")
    options = _Options(scale, sliding_window, sinks, mode, num_threads)
    _staged(q, staging, context_lens, out, options, num_kv_heads, value_dim=head_dim, has_values=True)


def staged_latent_attention(
    q: torch.Tensor,
    staging: torch.Tensor,
    context_lens: torch.Tensor,
    out: torch.Tensor,
    *,
    scale: float,
    num_threads: int = 1,
    mode: str = "float32",
) -> None:
    """Attend as `latent_attention` does, to sequences that `kv_gather` left one after another.

    staging: [tokens of all sequences * (latent_dim + rope_dim)]
    """
    check.cpu("q", q, 3)
    check.cpu("out", out, 3)
    if not 0 < out.shape[2] <= q.shape[2]:
        raise ValueError(f"out: expected latent_dim from 1 to {q.shape[2]} (q's dimension), got {out.shape[2]}")
    options = _Options(scale, 0, None, mode, num_threads)
    _staged(q, staging, context_lens, out, options, 1, value_dim=out.shape[2], has_values=False)


def _staged(
    q: torch.Tensor, staging: torch.Tensor, context_lens: torch.Tensor, out: torch.Tensor, options: _Options,
    num_kv_heads: int, *, value_dim: int, has_values: bool,
) -> None:  # fmt: skip
    """Make the checks and the call of both attentions over what was staged."""
    num_seqs, num_heads, head_dim = q.shape
    check.cpu("staging", staging, 1)
    check.cpu("context_lens", context_lens, 1)
    check.cpu("out", out, 3)
    check.contiguous("staging", staging)
    check.contiguous("context_lens", context_lens)
    check.dtype("context_lens", context_lens, torch.int32)
    check.shape("context_lens", context_lens, (num_seqs,))
    check.shape("out", out, (num_seqs, num_heads, value_dim))
    codes = _codes(q, out, "staging", staging)
    options.check(num_heads)
    q_stride, out_stride = check.rows("q", q), check.rows("out", out)
    tensors = {"out": out, "q": q, "staging": staging, "context_lens": context_lens, **options.tensors}
    check.disjoint("out", check.spans(**tensors))
    num_threads = _options.num_threads(options.num_threads)
    if out.numel():
        native().staged_attention(
            q.data_ptr(), out.data_ptr(), staging.data_ptr(), context_lens.data_ptr(), options.sinks_address, *codes,
            num_seqs, num_heads, num_kv_heads, head_dim, value_dim, has_values, staging.numel(), q_stride, out_stride,
            options.scale, options.sliding_window, _MODES[options.mode], num_threads,
        )  # fmt: skip


def _codes(q: torch.Tensor, out: torch.Tensor, cache_name: str, cache: torch.Tensor) -> tuple[int, int, int]:
    """Return the numbers of the dtypes of q, out and the cache."""
    q_code, out_code = check.float_code("q", q), check.float_code("out", out)
    kv_code = check.float_code(cache_name, cache)
    if out_code not in (q_code, 2):
        raise ValueError(f"out: expected {q.dtype} as q has, or float32, got {out.dtype}")
    return q_code, out_code, kv_code


@dataclass(slots=True)
class _Rows:
    """The values of attention: a cache of their own, or the first elements of the keys' rows (latent attention)."""

    name: str
    tensor: torch.Tensor
    block_stride: int
    dim: int


@dataclass(slots=True)
class _Options:
    scale: float
    sliding_window: int
    sinks: torch.Tensor | None
    mode: str
    num_threads: int

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        return {} if self.sinks is None else {"sinks": self.sinks}

    @property
    def sinks_address(self) -> int:
        return 0 if self.sinks is None else self.sinks.data_ptr()

    def check(self, num_heads: int) -> None:
        _options.finite("scale", self.scale)
        _options.integer("sliding_window", self.sliding_window, 0, " (off)")
        _options.one_of("mode", self.mode, _MODES)
        if self.sinks is not None:
            check.cpu("sinks", self.sinks, 1)
            check.dtype("sinks", self.sinks, torch.float32)
            check.shape("sinks", self.sinks, (num_heads,))
            check.contiguous("sinks", self.sinks)


def _decode(
    q: torch.Tensor,
    cache_name: str,
    k_cache: torch.Tensor,  # [num_blocks, kv_heads, block_size, head_dim]
    values: _Rows,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    out: torch.Tensor,
    options: _Options,
) -> None:
    """Make the checks and the call that the two attentions share."""
    num_seqs, num_heads, head_dim = q.shape
    num_blocks, num_kv_heads, block_size, _ = k_cache.shape
    check.cpu("block_tables", block_tables, 2)
    check.cpu("context_lens", context_lens, 1)
    max_blocks = block_tables.shape[1]
    if block_size == 0:
        raise ValueError(f"{cache_name}: block_size is 0")
    check.shape("block_tables", block_tables, (num_seqs, max_blocks))
    check.shape("context_lens", context_lens, (num_seqs,))
    check.shape("out", out, (num_seqs, num_heads, values.dim))
    check.dtype("block_tables", block_tables, torch.int32)
    check.dtype("context_lens", context_lens, torch.int32)
    check.contiguous("context_lens", context_lens)
    codes = _codes(q, out, cache_name, k_cache)
    options.check(num_heads)

    q_stride, out_stride = check.rows("q", q), check.rows("out", out)
    k_stride, table_stride = check.rows(cache_name, k_cache), check.rows("block_tables", block_tables)
    tensors = {cache_name: k_cache, values.name: values.tensor, **options.tensors}
    spans = check.spans(out=out, q=q, block_tables=block_tables, context_lens=context_lens, **tensors)
    check.disjoint("out", spans)
    num_threads = _options.num_threads(options.num_threads)
    if not out.numel():
        return
    native().decode_attention(
        spans["q"][0], spans["out"][0], spans[cache_name][0], spans[values.name][0], spans["block_tables"][0],
        spans["context_lens"][0], options.sinks_address, *codes, num_seqs, num_heads, num_kv_heads, head_dim,
        values.dim, num_blocks, block_size, max_blocks, q_stride, out_stride, k_stride, values.block_stride,
        table_stride, options.scale, options.sliding_window, _MODES[options.mode], num_threads,
    )  # fmt: skip
