"""Measure how fast host memory is read and copied beyond all caches; every rate of the table lies below this."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import numpy as np

import kernels
from harness.calibration.undisturbed import Undisturbed
from kernels._extension import native

_MIN_BYTES = 512_000_000
_READ_STREAMS = 16  # as many places of the buffer are read in turn: more DRAM pages are open at once
_CACHE_MULTIPLE = 4  # of the last cache: what a pass leaves there must not serve the next one
_MAX_RAM_SHARE = 0.15
_LAST_CACHE = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")


def working_set_bytes(last_cache_bytes: int, ram_bytes: int) -> int:
    """Return how many bytes to go through: more than the caches hold, where memory allows it."""
    return int(min(max(_MIN_BYTES, _CACHE_MULTIPLE * last_cache_bytes), _MAX_RAM_SHARE * ram_bytes))


def last_cache_bytes() -> int:
    """Return the size of the last cache as the system states it, or 0 where it does not. A virtual machine may state
    the size for the whole socket."""
    try:
        text = _LAST_CACHE.read_text().strip()
    except OSError:
        return 0
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    return int(text[:-1]) * units[text[-1]] if text[-1:] in units else int(text or 0)


def measure_memory(undisturbed: Undisturbed, ram_bytes: int, repeats: int) -> Mapping[str, list[float]]:
    """Measure the GB/s of every repeat, by what was done on how many threads. The item "working_set_gb" is the size of
    the memory."""
    num_bytes = working_set_bytes(last_cache_bytes(), ram_bytes)
    buffer = np.empty(num_bytes, dtype=np.uint8)
    address, half = buffer.ctypes.data, num_bytes // 2
    ctypes.memset(address, 1, num_bytes)  # every page exists

    def read(num_threads: int) -> float:
        return _gb_s(num_bytes, lambda: native().stream_read(address, num_bytes, _READ_STREAMS, num_threads))

    def copy(num_threads: int) -> float:
        return _gb_s(half, lambda: native().stream_copy(address + half, address, half, num_threads))

    found: dict[str, list[float]] = {"working_set_gb": [num_bytes / 1e9]}
    for num_threads in sorted({1, kernels.num_cores()}):
        for name, measured in (("read", read), ("copy", copy)):
            label = f"{name}_{num_threads}_thread{'s' if num_threads > 1 else ''}"
            runs = [undisturbed(f"memory {label}", partial(measured, num_threads)) for _ in range(repeats)]
            found[label] = runs
    return found


def _gb_s(num_bytes: int, run: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    run()
    return num_bytes / (time.perf_counter() - start_s) / 1e9
