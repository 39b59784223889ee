"""Decode attention of one shape in this process: our kernel, the compiled baselines, torch's matmuls."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
import torch

from benchmarks.support import decode_data as data
from benchmarks.support.decode_data import DecodeShape
from benchmarks.support.stopwatch import Stopwatch, stopwatch
from kernels import decode_attention
from kernels._extension import native

BLOCK_SIZE = 16


def as_bf16(bits: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)


class PagedAttention:
    """The paged cache of our layout, [num_blocks, kv_heads, block_size, head_dim]; outputs are float32.

    With `num_sharing` above 1, so many sequences share each sequence's blocks: much arithmetic on memory that stays in
    the caches.
    """

    def __init__(self, shape: DecodeShape, num_sharing: int = 1) -> None:
        self.shape = shape
        self._tables = data.block_tables(shape, BLOCK_SIZE)
        cache_shape = (int(self._tables.max()) + 1, shape.num_kv_heads, BLOCK_SIZE, shape.head_dim)
        self._k, self._v = (data.huge_array(cache_shape, np.uint16) for _ in range(2))
        data.fill_paged(shape, self._tables, BLOCK_SIZE, self._k, self._v)
        self._tables = np.tile(self._tables, (num_sharing, 1))
        self._q = np.tile(data.queries(shape), (num_sharing, 1, 1))
        self._lengths = np.tile(np.array(shape.lengths, dtype=np.int32), num_sharing)
        self.out = torch.zeros(self._q.shape)

    def ours(self, num_threads: int) -> Callable[[], None]:
        q, k, v = (as_bf16(bits) for bits in (self._q, self._k, self._v))
        tables, lengths = torch.from_numpy(self._tables), torch.from_numpy(self._lengths)
        scale = self.shape.scale
        return lambda: decode_attention(q, k, v, tables, lengths, self.out, scale=scale, num_threads=num_threads)

    def ours_on(self, isa: str, num_threads: int) -> Stopwatch:
        """Time the code path of another instruction set; the process's own choice is put back after each run."""
        run = stopwatch(self.ours(num_threads))

        def timed() -> float:
            native().set_isa(isa)
            try:
                return run()
            finally:
                native().set_isa("")

        return timed

    def compiled(self, library: ctypes.CDLL, num_threads: int) -> Stopwatch:
        arrays = (self._q, self._k, self._v, self._tables, self._lengths, self.out.numpy())
        pointers = [ctypes.c_void_p(array.ctypes.data) for array in arrays]
        shape = self.shape
        numbers = (len(self._lengths), shape.num_heads, shape.num_kv_heads, shape.head_dim, BLOCK_SIZE)
        sizes = [ctypes.c_int(number) for number in (*numbers, self._tables.shape[1])]
        scale, threads = ctypes.c_float(shape.scale), ctypes.c_int(num_threads)
        return stopwatch(lambda: library.decode_attention(*pointers, *sizes, scale, threads))
