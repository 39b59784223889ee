"""Read pinned host memory from kernels, so that small and scattered rows cross the link beside large copies.

A GPU has one copy engine for each direction. A small copy that another stream gives it waits for the large ones that
stand there, whatever the streams' priorities: on an H200, 4.5 MB beside weights took 1.4 to 2.4 ms instead of 0.08.
A kernel's reads share the link instead. They also gather what is scattered, which else a core of the host would do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from threading import Lock
from typing import Any

import torch
import triton
import triton.language as tl

from kernels.triton import arguments as check
from kernels.triton.device import cdiv, power_of_two

_BLOCK = 1024  # words of a program
_CHUNK = 4096  # numbers of a cache that a program reads at once
_PROGRAMS = 256  # that gather: their 8 KB each are enough to keep a link busy, and leave the processors to others
_WORD = torch.int64
_lock = Lock()
_under_way: deque[tuple[Any, torch.Tensor]] = deque()  # what kernels may still read, each behind an event


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["dst", "src"])
def _bring(dst, src, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(dst + at, tl.load(src + at, mask=at < count), mask=at < count)


@triton.jit(do_not_specialize=["num_seqs", "max_blocks", "before"], do_not_specialize_on_alignment=["numbers"])
def _gather(
    cache, numbers, out, num_seqs, max_blocks, stride, before,
    HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr, IS_ALIGNED: tl.constexpr,
):  # fmt: skip
    """Copy blocks of sequences and heads in turn. `before` is what a token's earlier caches have, in elements."""
    element = tl.arange(0, CHUNK)
    for item in range(tl.program_id(0), num_seqs * max_blocks * HEADS, tl.num_programs(0)):
        head, entry = item % HEADS, item // HEADS
        block, sequence = entry % max_blocks, entry // max_blocks
        length = tl.load(numbers + num_seqs + sequence)
        first = block * BLOCK_SIZE
        count = tl.minimum(BLOCK_SIZE, length - first) * WIDTH  # none behind the last token
        number = tl.load(numbers + 2 * num_seqs + entry, mask=count > 0, other=0)
        at = number * stride + head * (BLOCK_SIZE * WIDTH)
        to = tl.load(numbers + sequence) + before * length + (head * length + first) * WIDTH
        if IS_ALIGNED:
            at, to, count = tl.multiple_of(at, 16), tl.multiple_of(to, 16), tl.multiple_of(count, 16)
        for chunk in tl.static_range(0, BLOCK_SIZE * WIDTH, CHUNK):
            there = chunk + element < count
            tl.store(out + to + chunk + element, tl.load(cache + at + chunk + element, mask=there), mask=there)


def bring(dst: torch.Tensor, src: torch.Tensor) -> None:
    """Copy pinned host memory to the device, in the current stream.

    dst, src: contiguous, alike in shape and dtype; `src` stays as it is until the stream has done this (`keep`)
    """
    if dst.shape != src.shape or dst.dtype is not src.dtype:
        raise ValueError(f"src: expected {tuple(dst.shape)} {dst.dtype} as dst, got {tuple(src.shape)} {src.dtype}")
    if not dst.is_contiguous() or not src.is_contiguous():
        raise ValueError("dst, src: expected contiguous tensors")
    if src.numel() == 0:
        return
    to, its = (_words(x) for x in (dst, src))
    if to.dtype is not its.dtype:
        to, its = (x.view(-1).view(torch.uint8) for x in (dst, src))
    _bring[(cdiv(its.numel(), _BLOCK),)](to, its, its.numel(), BLOCK=_BLOCK)


def _words(x: torch.Tensor) -> torch.Tensor:
    """Return contiguous memory as 8-byte words, or as bytes where it is none."""
    flat = x.view(-1).view(torch.uint8)
    size = _WORD.itemsize
    is_whole = flat.data_ptr() % size == 0 and flat.storage_offset() % size == 0 and flat.numel() % size == 0
    return flat.view(_WORD) if is_whole else flat


def keep(src: torch.Tensor) -> None:
    """Keep memory until the current stream has done what it was given. torch's allocator knows nothing of kernels that
    read pinned memory."""
    event = torch.cuda.Event()
    event.record()
    with _lock:
        while _under_way and _under_way[0][0].query():
            _under_way.popleft()
        _under_way.append((event, src))


def gather_numbers(tables: torch.Tensor, lengths: torch.Tensor, token_dim: int) -> torch.Tensor:
    """Return what `gather_kv` must know of sequences, as int64: where each begins in the result, how many tokens it
    has, and its blocks.

    tables: int32 [seqs, max_blocks]; lengths: int32 [seqs]; token_dim: elements of a token, of all caches
    """
    lengths = lengths.long()
    ends = lengths.cumsum(0) * token_dim
    return torch.cat((ends - lengths * token_dim, lengths, tables.flatten().long()))


def gather_kv(
    caches: Sequence[torch.Tensor], numbers: torch.Tensor, num_seqs: int, max_blocks: int, out: torch.Tensor
) -> None:
    """Copy sequences out of one layer's paged cache in pinned memory, one behind the other, as `kernels.kv_gather`.

    caches:  keys and values, or latents: each [num_blocks, heads, block_size, width]; may be strided in dim 0
    numbers: `gather_numbers`, in pinned or device memory: they stay as they are until the stream has done this
    out:     [tokens of all sequences * elements of a token] on the device, in the caches' dtype

    Block numbers are not looked at here. Raises ValueError naming the argument.
    """
    check.floats("out", out, 1)
    if numbers.shape != (num_seqs * (2 + max_blocks),) or numbers.dtype is not torch.int64:
        raise ValueError(f"numbers: expected int64 [{num_seqs * (2 + max_blocks)}], got {tuple(numbers.shape)}")
    before = 0
    is_even = out.data_ptr() % 16 == 0 and all(c.shape[3] % 16 == 0 and c.data_ptr() % 16 == 0 for c in caches)
    for at, cache in enumerate(caches):
        _, heads, block_size, width = cache.shape
        if cache.stride()[1:] != (block_size * width, width, 1) or cache.dtype is not out.dtype:
            raise ValueError(f"caches[{at}]: expected contiguous blocks of {out.dtype}, got {cache.stride()}")
        num_items = num_seqs * max_blocks * heads
        if num_items:
            _gather[(min(num_items, _PROGRAMS),)](
                cache, numbers, out, num_seqs, max_blocks, cache.stride(0), before,
                HEADS=heads, BLOCK_SIZE=block_size, WIDTH=width, CHUNK=min(power_of_two(block_size * width), _CHUNK),
                IS_ALIGNED=is_even and cache.stride(0) % 16 == 0,
            )  # fmt: skip
        before += heads * width
