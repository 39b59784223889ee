"""Write new keys and values into the paged KV cache, and gather sequences out of it."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from kernels import _options
from kernels import _tensors as check
from kernels._extension import native
from kernels._tensors import FLOATS, SLOTS, Expected


def kv_append(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    num_threads: int = 1,
) -> None:
    """Scatter new tokens into one layer's cache, converting dtypes (round to nearest even).

    k, v:             [tokens, kv_heads, head_dim]; may be strided in dim 0; same dtype
    k_cache, v_cache: [num_blocks, kv_heads, block_size, head_dim]; may be strided in dim 0; same dtype
    slots:            int32 or int64 [tokens], block * block_size + offset; of equal slots the last token wins

    The blocks of both caches may alternate in one tensor (pool[:, 0] and pool[:, 1]), but no block may overlap another.
    `num_threads` is that of `decode_attention`; threads share the heads. Raises ValueError naming the argument; nothing
    is written if a slot is out of range.
    """
    sizes, places = _quick_append()(k, v, k_cache, v_cache, slots) or _checked_append(k, v, k_cache, v_cache, slots)
    num_threads = _options.num_threads(num_threads)
    if sizes[0]:
        native().kv_append(*sizes, *places, num_threads)


def latent_append(latent: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, *, num_threads: int = 1) -> None:
    """Scatter the compressed rows of new tokens into one layer's cache for `latent_attention`, converting dtypes.

    latent: [tokens, dim]; may be strided in dim 0
    cache:  [num_blocks, block_size, dim]; may be strided in dim 0
    slots:  as in `kv_append`, as is `num_threads`: threads share a row's columns
    """
    found = _quick_latent_append()(latent, cache, slots) or _checked_latent_append(latent, cache, slots)
    (num_tokens, dim, num_blocks, block_size), places = found
    num_threads = _options.num_threads(num_threads)
    if num_tokens:
        latent_at, cache_at, slots_at, *codes, stride, block_stride = places
        native().kv_append(
            num_tokens, 1, dim, num_blocks, block_size, latent_at, 0, cache_at, 0, slots_at, *codes, stride, stride,
            block_stride, block_stride, num_threads,
        )  # fmt: skip


def kv_gather(
    caches: Sequence[torch.Tensor], block_tables: torch.Tensor, lengths: torch.Tensor, out: torch.Tensor
) -> None:
    """Copy sequences out of one layer's paged cache, one contiguous sequence after another.

    caches:       keys and values, or latents: each [num_blocks, heads, block_size, width]; may be strided in dim 0
    block_tables: int32 [seqs, max_blocks]; entries behind a sequence's last token are never read
    lengths:      int32 [seqs], tokens of each sequence
    out:          [tokens of all sequences * elements of a token]: for each sequence one cache after another, each
                  [heads, length, width]; the caches' dtype

    Raises ValueError naming the argument; nothing is written if a length or a used block id is out of range.
    """
    if not caches:
        raise ValueError("caches: expected one or more")
    check.cpu("block_tables", block_tables, 2)
    check.cpu("lengths", lengths, 1)
    check.cpu("out", out, 1)
    num_blocks, _, block_size, _ = caches[0].shape
    num_seqs, max_blocks = block_tables.shape
    check.shape("lengths", lengths, (num_seqs,))
    check.dtype("block_tables", block_tables, torch.int32)
    check.dtype("lengths", lengths, torch.int32)
    check.contiguous("lengths", lengths)
    check.contiguous("out", out)
    pieces, named = [], {}
    for at, cache in enumerate(caches):
        name = f"caches[{at}]"
        check.cpu(name, cache, 4)
        _, heads, _, width = cache.shape
        check.shape(name, cache, (num_blocks, heads, block_size, width))
        check.dtype(name, cache, out.dtype)
        pieces.append((cache.data_ptr(), check.rows(name, cache) * cache.itemsize, width * cache.itemsize, heads))
        named[name] = cache
    if block_size == 0:
        raise ValueError("caches[0]: block_size is 0")
    table_stride = check.rows("block_tables", block_tables)
    check.disjoint("out", check.spans(out=out, block_tables=block_tables, lengths=lengths, **named))
    native().kv_gather(
        pieces, block_tables.data_ptr(), lengths.data_ptr(), out.data_ptr(), num_blocks, table_stride, out.nbytes,
        num_seqs, max_blocks, block_size,
    )  # fmt: skip


@functools.cache
def _quick_append() -> check.Quick:
    return check.quick(
        k=Expected("nhd", FLOATS),
        v=Expected("nhd", like="k"),
        k_cache=Expected("bhtd", FLOATS, written=True),
        v_cache=Expected("bhtd", like="k_cache", written=True),
        slots=Expected("n", SLOTS, contiguous=True),
    )


@functools.cache
def _quick_latent_append() -> check.Quick:
    return check.quick(
        latent=Expected("nd", FLOATS),
        cache=Expected("btd", FLOATS, written=True),
        slots=Expected("n", SLOTS, contiguous=True),
    )


def _checked_append(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor
) -> check.Found:
    check.cpu("k", k, 3)
    check.cpu("v", v, 3)
    check.cpu("k_cache", k_cache, 4)
    check.cpu("v_cache", v_cache, 4)
    check.cpu("slots", slots, 1)
    num_tokens, num_kv_heads, head_dim = k.shape
    num_blocks, _, block_size, _ = k_cache.shape
    check.shape("v", v, (num_tokens, num_kv_heads, head_dim))
    check.shape("k_cache", k_cache, (num_blocks, num_kv_heads, block_size, head_dim))
    check.shape("v_cache", v_cache, (num_blocks, num_kv_heads, block_size, head_dim))
    check.shape("slots", slots, (num_tokens,))
    codes = check.float_code("k", k), check.float_code("k_cache", k_cache)
    check.dtype("v", v, k.dtype)
    check.dtype("v_cache", v_cache, k_cache.dtype)
    slots_code = _checked_slots(slots)
    sizes = num_tokens, num_kv_heads, head_dim, num_blocks, block_size
    if num_tokens == 0:
        return sizes, ()
    strides = check.rows("k", k), check.rows("v", v), check.rows("k_cache", k_cache), check.rows("v_cache", v_cache)
    spans = check.spans(k=k, v=v, k_cache=k_cache, v_cache=v_cache, slots=slots)
    check.disjoint("k_cache", spans, "k", "v", "slots")
    check.disjoint("v_cache", spans, "k", "v", "slots")
    check.disjoint_rows("v_cache", v_cache, "k_cache", k_cache)
    return sizes, (*[start for start, _ in spans.values()], *codes, slots_code, *strides)


def _checked_latent_append(latent: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> check.Found:
    check.cpu("latent", latent, 2)
    check.cpu("cache", cache, 3)
    check.cpu("slots", slots, 1)
    num_tokens, dim = latent.shape
    num_blocks, block_size, _ = cache.shape
    check.shape("cache", cache, (num_blocks, block_size, dim))
    check.shape("slots", slots, (num_tokens,))
    slots_code = _checked_slots(slots)
    sizes = num_tokens, dim, num_blocks, block_size
    if num_tokens == 0:
        return sizes, ()
    codes = check.float_code("latent", latent), check.float_code("cache", cache)
    strides = check.rows("latent", latent), check.rows("cache", cache)
    spans = check.spans(latent=latent, cache=cache, slots=slots)
    check.disjoint("cache", spans)
    return sizes, (*[start for start, _ in spans.values()], *codes, slots_code, *strides)


def _checked_slots(slots: torch.Tensor) -> int:
    if slots.dtype not in SLOTS:
        raise ValueError(f"slots: expected torch.int64 or torch.int32, got {slots.dtype}")
    check.contiguous("slots", slots)
    return check.DTYPE_CODES[slots.dtype]
