"""Measure how fast this machine reads, copies and multiplies, as contestants of every benchmark."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from benchmarks.support.decode_data import huge_array
from benchmarks.support.stopwatch import Stopwatch, stopwatch
from benchmarks.support.torch_threads import with_threads
from kernels._extension import native

GEMM_SIZES = {torch.float32: 1024, torch.bfloat16: 2560}  # some 20 ms of work for a core and longer
READ_STREAMS = (1, 4, 16)


def read_loop(buffer: np.ndarray, num_streams: int, num_threads: int) -> Stopwatch:
    address, num_bytes = buffer.ctypes.data, buffer.nbytes
    return stopwatch(lambda: native().stream_read(address, num_bytes, num_streams, num_threads))


class Ceilings:
    """The ceilings are measured on two buffers of `num_bytes` in huge pages."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._src, self._dst = (huge_array((num_bytes,), np.uint8) for _ in range(2))
        self._src.fill(1)
        self._dst.fill(1)

    def read(self, num_threads: int) -> Stopwatch:
        """Read every byte of one buffer, `num_bytes` of traffic: the fastest loop of 1, 4 and 16 streams a thread."""
        loops = [read_loop(self._src, num_streams, num_threads) for num_streams in READ_STREAMS]
        return lambda: min(loop() for loop in loops)

    def copy(self, num_threads: int) -> Stopwatch:
        """Copy one buffer to the other, `num_bytes`, in the faster of two ways.

        These are libc's memcpy, each thread with its part, and the kernels' own loop of non-temporal stores.
        """
        dst, src = self._dst.ctypes.data, self._src.ctypes.data
        part = self.num_bytes // num_threads
        threads = ThreadPoolExecutor(num_threads)

        def memcpy(index: int) -> None:  # ctypes releases the GIL
            ctypes.memmove(dst + index * part, src + index * part, part)

        by_libc = stopwatch(lambda: list(threads.map(memcpy, range(num_threads))))
        streaming = stopwatch(lambda: native().stream_copy(dst, src, self.num_bytes, num_threads))
        return lambda: min(by_libc(), streaming())

    @staticmethod
    def gemm(num_threads: int, dtype: torch.dtype = torch.float32) -> Stopwatch:
        """Multiply square matrices in torch's BLAS, `gemm_flops` of work: what arithmetic reaches in caches."""
        size = GEMM_SIZES[dtype]
        a, b = (torch.randn(size, size).to(dtype) for _ in range(2))
        out = torch.empty(size, size, dtype=dtype)
        return with_threads(lambda: torch.mm(a, b, out=out), num_threads)

    def gflop(self, num_threads: int, shares: Mapping[torch.dtype, float]) -> Stopwatch:
        """Return the time of 1e9 operations at the speeds of `gemm`, with these shares of them in each type."""
        loops = {dtype: self.gemm(num_threads, dtype) for dtype in shares}
        return lambda: sum(share * 1e9 / self.gemm_flops(dtype) * loops[dtype]() for dtype, share in shares.items())

    @staticmethod
    def gemm_flops(dtype: torch.dtype = torch.float32) -> int:
        return 2 * GEMM_SIZES[dtype] ** 3
