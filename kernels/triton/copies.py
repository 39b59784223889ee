"""Read pinned host memory from kernels, so that small and scattered rows cross the link beside large copies.

A GPU has one copy engine for each direction. A small copy that another stream gives it waits for the large ones that
stand there, whatever the streams' priorities: on an H200, 4.5 MB beside weights took 2.4 ms, and 50 KB up to 11 ms.
A kernel's reads share the link instead. They also gather what is scattered, which else a core of the host would do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from kernels.triton import arguments as check
from kernels.triton.device import cdiv, power_of_two

_BLOCK = 1024  # words of a program
_WORD = torch.int64
_under_way: deque[tuple[Any, torch.Tensor]] = deque()  # what kernels may still read, each behind an event


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["dst", "src"])
def _bring(dst, src, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(dst + at, tl.load(src + at, mask=at < count), mask=at < count)


@triton.jit(do_not_specialize=["num_seqs", "max_blocks", "before"], do_not_specialize_on_alignment=["numbers"])
def _gather(
    cache, numbers, out, num_seqs, max_blocks, stride, before,
    BLOCK_SIZE: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, IS_ALIGNED: tl.constexpr,
):  # fmt: skip
    """Copy one block of one sequence and head. `before` is what a token's earlier caches have, in elements."""
    block, head, sequence = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    length = tl.load(numbers + num_seqs + sequence)
    first = block * BLOCK_SIZE
    if first >= length:
        return
    begin = tl.load(numbers + sequence)
    number = tl.load(numbers + 2 * num_seqs + sequence.to(tl.int64) * max_blocks + block)
    at = number * stride + head * (BLOCK_SIZE * WIDTH)
    to = begin + before * length + (head * length + first) * WIDTH
    count = tl.minimum(BLOCK_SIZE, length - first) * WIDTH
    if IS_ALIGNED:
        at, to, count = tl.multiple_of(at, 16), tl.multiple_of(to, 16), tl.multiple_of(count, 16)
    element = tl.arange(0, ROWS)
    there = element < count
    tl.store(out + to + element, tl.load(cache + at + element, mask=there), mask=there)


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
    """Keep memory that no one else does until the current stream has done what it was given: torch's allocator knows
    nothing of kernels that read pinned memory."""
    while _under_way and _under_way[0][0].query():
        _under_way.popleft()
    event = torch.cuda.Event()
    event.record()
    _under_way.append((event, src))


def gather_numbers(tables: torch.Tensor, lengths: torch.Tensor, token_dim: int) -> torch.Tensor:
    """Return what `gather_kv` must know of sequences, as int64: where each begins in the result, how many tokens it
    has, and its blocks.

    tables: int32 [seqs, max_blocks]; lengths: int32 [seqs]; token_dim: elements of a token, of all caches
    """
    ends = lengths.long().cumsum(0) * token_dim
    return torch.cat((ends - lengths * token_dim, lengths.long(), tables.flatten().long()))


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
        stride, rows = cache.stride(0), block_size * width
        if num_seqs and max_blocks:
            _gather[(max_blocks, heads, num_seqs)](
                cache, numbers, out, num_seqs, max_blocks, stride, before,
                BLOCK_SIZE=block_size, WIDTH=width, ROWS=power_of_two(rows), IS_ALIGNED=is_even and stride % 16 == 0,
            )  # fmt: skip
        before += heads * width
