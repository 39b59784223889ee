"""Compute decode attention over a paged KV cache, and latent attention over a compressed one."""

from __future__ import annotations

import functools

import torch

from kernels import _options
from kernels import _tensors as check
from kernels._extension import native
from kernels._tensors import FLOAT32, FLOATS, INT32, Expected

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
    found = _quick_decode()(q, k_cache, v_cache, block_tables, context_lens, out, sinks)
    if found is None or found[0][1] % found[0][4]:  # heads, KV heads
        found = _checked_decode(q, k_cache, v_cache, block_tables, context_lens, out, sinks)
    sizes, places = found
    options = _checked_options(scale, sliding_window, mode, num_threads)
    if sizes[0] and sizes[1]:
        native().decode_attention(sizes[2], *sizes, *places, *options)


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
    found = _quick_latent()(q, cache, block_tables, context_lens, out, None)
    if found is None or found[0][6] > found[0][2]:  # dimensions of out and q
        found = _checked_latent(q, cache, block_tables, context_lens, out)
    (num_seqs, num_heads, dim, num_blocks, block_size, max_blocks, latent_dim), places = found
    q_at, cache_at, *other_places, q_stride, cache_stride, table_stride, out_stride = places
    options = _checked_options(scale, 0, mode, num_threads)
    if num_seqs and num_heads:
        native().decode_attention(
            latent_dim, num_seqs, num_heads, dim, num_blocks, 1, block_size, max_blocks, q_at, cache_at, cache_at,
            *other_places, q_stride, cache_stride, cache_stride, table_stride, out_stride, *options,
        )  # fmt: skip


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
    found = _quick_staged("D")(q, staging, context_lens, out, sinks)
    if found is None or num_kv_heads < 1 or found[0][1] % num_kv_heads:
        found = _checked_staged(q, staging, context_lens, out, sinks, num_kv_heads)
    sizes, places = found
    options = _checked_options(scale, sliding_window, mode, num_threads)
    if sizes[0] and sizes[1]:
        native().staged_attention(True, num_kv_heads, sizes[2], *sizes, *places, *options)


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
    found = _quick_staged("L")(q, staging, context_lens, out, None)
    if found is None or found[0][4] > found[0][2]:  # dimensions of out and q
        found = _checked_staged_latent(q, staging, context_lens, out)
    sizes, places = found
    options = _checked_options(scale, 0, mode, num_threads)
    if sizes[0] and sizes[1]:
        native().staged_attention(False, 1, sizes[4], *sizes[:4], *places, *options)


def _checked_options(scale: float, sliding_window: int, mode: str, num_threads: int) -> tuple[float, int, bool, int]:
    _options.finite("scale", scale)
    _options.integer("sliding_window", sliding_window, 0, " (off)")
    _options.one_of("mode", mode, _MODES)
    return scale, sliding_window, _MODES[mode], _options.num_threads(num_threads)


_LENS = Expected("s", (INT32,), contiguous=True)
_SINKS = Expected("h", (FLOAT32,), contiguous=True, optional=True)


@functools.cache
def _quick_decode() -> check.Quick:
    return check.quick(
        q=Expected("shD", FLOATS),
        k_cache=Expected("bGTD", FLOATS),
        v_cache=Expected("bGTD", like="k_cache"),
        block_tables=Expected("sm", (INT32,)),
        context_lens=_LENS,
        out=Expected("shD", (FLOAT32,), like="q", written=True),
        sinks=_SINKS,
    )


@functools.cache
def _quick_latent() -> check.Quick:
    return check.quick(
        q=Expected("shd", FLOATS),
        cache=Expected("bTd", FLOATS),
        block_tables=Expected("sm", (INT32,)),
        context_lens=_LENS,
        out=Expected("shL", (FLOAT32,), like="q", written=True),
        sinks=_SINKS,
    )


@functools.cache
def _quick_staged(value_dim: str) -> check.Quick:
    return check.quick(
        q=Expected("shD", FLOATS),
        staging=Expected("e", FLOATS, contiguous=True),
        context_lens=_LENS,
        out=Expected("sh" + value_dim, (FLOAT32,), like="q", written=True),
        sinks=_SINKS,
    )


def _checked_decode(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_tables: torch.Tensor,
    context_lens: torch.Tensor, out: torch.Tensor, sinks: torch.Tensor | None,
) -> check.Found:  # fmt: skip
    check.cpu("q", q, 3)
    check.cpu("k_cache", k_cache, 4)
    check.cpu("v_cache", v_cache, 4)
    check.cpu("out", out, 3)
    num_seqs, num_heads, head_dim = q.shape
    num_blocks, num_kv_heads, block_size, cache_dim = k_cache.shape
    if cache_dim != head_dim or head_dim == 0:
        raise ValueError(f"k_cache: expected head_dim {head_dim} as q has, got {cache_dim}")
    if num_kv_heads == 0 or num_heads % num_kv_heads:
        raise ValueError(f"k_cache: q's {num_heads} heads are no multiple of {num_kv_heads} KV heads")
    check.shape("v_cache", v_cache, (num_blocks, num_kv_heads, block_size, head_dim))
    check.dtype("v_cache", v_cache, k_cache.dtype)
    caches = {"k_cache": k_cache, "v_cache": v_cache}
    places = _checked_pages(q, caches, block_tables, context_lens, out, head_dim, sinks)
    return (num_seqs, num_heads, head_dim, num_blocks, num_kv_heads, block_size, block_tables.shape[1]), places


def _checked_latent(
    q: torch.Tensor, cache: torch.Tensor, block_tables: torch.Tensor, context_lens: torch.Tensor, out: torch.Tensor
) -> check.Found:
    check.cpu("q", q, 3)
    check.cpu("cache", cache, 3)
    check.cpu("out", out, 3)
    if cache.shape[2] != q.shape[2]:
        raise ValueError(f"cache: expected rows of {q.shape[2]} elements as q has, got {cache.shape[2]}")
    _check_latent_dim(q, out)
    places = _checked_pages(q, {"cache": cache}, block_tables, context_lens, out, out.shape[2], None)
    return (*q.shape, *cache.shape[:2], block_tables.shape[1], out.shape[2]), places


def _checked_pages(
    q: torch.Tensor, caches: dict[str, torch.Tensor], block_tables: torch.Tensor, context_lens: torch.Tensor,
    out: torch.Tensor, value_dim: int, sinks: torch.Tensor | None,
) -> tuple[int, ...]:  # fmt: skip
    """Make the checks that both attentions over pages share."""
    (num_seqs, num_heads, _), (name, cache) = q.shape, next(iter(caches.items()))
    check.cpu("block_tables", block_tables, 2)
    check.cpu("context_lens", context_lens, 1)
    if cache.shape[-2] == 0:
        raise ValueError(f"{name}: block_size is 0")
    check.shape("block_tables", block_tables, (num_seqs, block_tables.shape[1]))
    check.shape("context_lens", context_lens, (num_seqs,))
    check.shape("out", out, (num_seqs, num_heads, value_dim))
    check.dtype("block_tables", block_tables, INT32)
    check.dtype("context_lens", context_lens, INT32)
    check.contiguous("context_lens", context_lens)
    codes = _codes(q, out, name, cache)
    _check_sinks(sinks, num_heads)
    tensors = {"q": q, **caches, "block_tables": block_tables, "context_lens": context_lens, "out": out, "sinks": sinks}
    return check.places(tensors, codes, contiguous=("context_lens", "sinks"))


def _checked_staged(
    q: torch.Tensor, staging: torch.Tensor, context_lens: torch.Tensor, out: torch.Tensor, sinks: torch.Tensor | None,
    num_kv_heads: int,
) -> check.Found:  # fmt: skip
    check.cpu("q", q, 3)
    _, num_heads, head_dim = q.shape
    if num_kv_heads < 1 or num_heads % num_kv_heads or not head_dim:
        raise ValueError(f"num_kv_heads: q's {num_heads} heads are no multiple of {num_kv_heads} KV heads")
    places = _checked_staging(q, staging, context_lens, out, head_dim, sinks)
    return (*q.shape, staging.numel()), places


def _checked_staged_latent(
    q: torch.Tensor, staging: torch.Tensor, context_lens: torch.Tensor, out: torch.Tensor
) -> check.Found:
    check.cpu("q", q, 3)
    check.cpu("out", out, 3)
    _check_latent_dim(q, out)
    places = _checked_staging(q, staging, context_lens, out, out.shape[2], None)
    return (*q.shape, staging.numel(), out.shape[2]), places


def _checked_staging(
    q: torch.Tensor, staging: torch.Tensor, context_lens: torch.Tensor, out: torch.Tensor, value_dim: int,
    sinks: torch.Tensor | None,
) -> tuple[int, ...]:  # fmt: skip
    """Make the checks that both attentions over what was staged share."""
    num_seqs, num_heads, _ = q.shape
    check.cpu("staging", staging, 1)
    check.cpu("context_lens", context_lens, 1)
    check.cpu("out", out, 3)
    check.contiguous("staging", staging)
    check.contiguous("context_lens", context_lens)
    check.dtype("context_lens", context_lens, INT32)
    check.shape("context_lens", context_lens, (num_seqs,))
    check.shape("out", out, (num_seqs, num_heads, value_dim))
    codes = _codes(q, out, "staging", staging)
    _check_sinks(sinks, num_heads)
    tensors = {"q": q, "staging": staging, "context_lens": context_lens, "out": out, "sinks": sinks}
    return check.places(tensors, codes, contiguous=("staging", "context_lens", "sinks"))


def _check_latent_dim(q: torch.Tensor, out: torch.Tensor) -> None:
    if not 0 < out.shape[2] <= q.shape[2]:
        raise ValueError(f"out: expected latent_dim from 1 to {q.shape[2]} (q's dimension), got {out.shape[2]}")


def _check_sinks(sinks: torch.Tensor | None, num_heads: int) -> None:
    if sinks is not None:
        check.cpu("sinks", sinks, 1)
        check.dtype("sinks", sinks, FLOAT32)
        check.shape("sinks", sinks, (num_heads,))
        check.contiguous("sinks", sinks)


def _codes(q: torch.Tensor, out: torch.Tensor, cache_name: str, cache: torch.Tensor) -> tuple[int, int, int]:
    """Return the numbers of the dtypes of q, the cache and out."""
    q_code, out_code = check.float_code("q", q), check.float_code("out", out)
    kv_code = check.float_code(cache_name, cache)
    if out_code not in (q_code, check.DTYPE_CODES[FLOAT32]):
        raise ValueError(f"out: expected {q.dtype} as q has, or float32, got {out.dtype}")
    return q_code, kv_code, out_code
