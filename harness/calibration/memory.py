"""Measure how fast host memory is read and copied beyond all caches, and how much the last cache really holds."""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from math import log
from pathlib import Path

import numpy as np

import kernels
from harness.calibration.undisturbed import Undisturbed
from kernels._extension import native

_MIN_BYTES = 512_000_000
_READ_STREAMS = 16  # as many places of the buffer are read in turn: more DRAM pages are open at once
_CACHE_MULTIPLE = 4  # of the last cache: what a pass leaves there must not serve the next one
_MAX_RAM_SHARE = 0.15
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_SMALLEST_BYTES, _RATIO, _READS = 4_000_000, 1.4, 5  # of buffers that are read again and again


def working_set_bytes(last_cache_bytes: int, ram_bytes: int) -> int:
    """Return how many bytes to go through: more than the caches hold, where memory allows it."""
    return int(min(max(_MIN_BYTES, _CACHE_MULTIPLE * last_cache_bytes), _MAX_RAM_SHARE * ram_bytes))


def stated_cache_bytes(level: int) -> int:
    """Return the size of a core's second or third cache as the system states it, or 0 where it does not. A virtual
    machine may state the third one of the whole socket, of which others have most."""
    try:
        text = (_CACHES / f"index{level}" / "size").read_text().strip()
    except OSError:
        return 0
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    return int(text[:-1]) * units[text[-1]] if text[-1:] in units else int(text or 0)


def measure_caches(undisturbed: Undisturbed, ram_bytes: int) -> dict[int, int]:
    """Return the bytes that a core finds in its second and in its third cache, by level. The former are the stated
    ones, the latter what `held_bytes` says of buffers that one thread reads again and again."""
    stated, sizes = stated_cache_bytes(3), [_SMALLEST_BYTES]
    most_bytes = min(max(_MIN_BYTES, stated), working_set_bytes(stated, ram_bytes))
    while sizes[-1] * _RATIO < most_bytes:
        sizes.append(int(sizes[-1] * _RATIO))
    buffer = np.empty(sizes[-1], dtype=np.uint8)
    address = buffer.ctypes.data
    ctypes.memset(address, 1, buffer.nbytes)

    def read(num_bytes: int) -> float:
        rates = [
            _gb_s(num_bytes, lambda: native().stream_read(address, num_bytes, _READ_STREAMS, 1))
            for _ in range(_READS + 1)
        ]
        return statistics.median(rates[1:])

    rates = {size: undisturbed(f"reading {size / 1e6:.0f} MB again", partial(read, size)) for size in sizes}
    return {2: stated_cache_bytes(2), 3: held_bytes(rates)}


def held_bytes(rates: Mapping[int, float]) -> int:
    """Return up to which size all are read faster than the geometric mean of the first and the last rate. Between the
    two sizes that were measured around it the rate is a straight line over the size, both on logarithmic scales."""
    sizes, (within, *_, beyond) = [*rates], [*rates.values()] * 2
    least = (within * beyond) ** 0.5
    slow = next((at for at, size in enumerate(sizes) if rates[size] < least), len(sizes))
    if slow in (0, len(sizes)):
        return sizes[min(slow, len(sizes) - 1)]
    fast_size, slow_size = sizes[slow - 1 : slow + 1]
    share = log(rates[fast_size] / least) / log(rates[fast_size] / rates[slow_size])
    return int(fast_size * (slow_size / fast_size) ** share)


def measure_memory(undisturbed: Undisturbed, ram_bytes: int, repeats: int) -> Mapping[str, list[float]]:
    """Measure the GB/s of every repeat, by what was done on how many threads. The item "working_set_gb" is the size of
    the memory."""
    num_bytes = working_set_bytes(stated_cache_bytes(3), ram_bytes)
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
