"""Measure how fast buffers of growing size are read, which shows when a working set exceeds the caches.

The size a machine reports for its last cache says little where a virtual machine has a share of it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from benchmarks.conftest import MIB, Scale
from benchmarks.support.ceilings import READ_STREAMS, read_loop
from benchmarks.support.decode_data import huge_array
from benchmarks.support.rounds import Rounds
from benchmarks.support.stopwatch import Stopwatch

LEAST_BYTES = 256 * MIB  # read in one run: small buffers several times


def _several(run: Stopwatch, times: int) -> Stopwatch:
    return lambda: sum(run() for _ in range(times))


@pytest.mark.parametrize("size_mib", [1, 16, 64, 128, 256, 512, 2048])
def test_read(benchmark: Any, report: Any, scale: Scale, size_mib: int, num_threads: int) -> None:
    buffer = huge_array((MIB if scale.quick else size_mib * MIB,), np.uint8)
    buffer.fill(1)
    times = 1 if scale.quick else max(1, LEAST_BYTES // buffer.nbytes)
    target, *others = [(n, _several(read_loop(buffer, n, num_threads), times)) for n in reversed(READ_STREAMS)]
    rounds = Rounds("ours", target[1], {str(n): run for n, run in others}, num_threads)
    rounds.measure(benchmark, -(-scale.num_rounds // 3))
    num_bytes = times * buffer.nbytes
    names = {target[0]: "ours", **{n: str(n) for n, _ in others}}
    speeds = {f"streams_{n}_gb_s": num_bytes / rounds.median_s(name) / 1e9 for n, name in names.items()}
    report(
        rounds,
        kernel="read",
        shape=f"{size_mib} MiB",
        num_threads=num_threads,
        gb_s=max(speeds.values()),
        **speeds,
    )
