"""Look for signs that a virtual machine's neighbours took part in a measurement.

Stolen time is not all of it: a guest on the other hyperthread of the same core slows arithmetic down by a quarter while
nothing is stolen. A small matrix product right before and after each run shows that.
"""

from __future__ import annotations

import statistics
import time
from typing import NamedTuple

import torch

from benchmarks.support.stopwatch import Stopwatch
from benchmarks.support.torch_threads import with_threads
from harness.hardware.steal import read_cpu_times

MAX_STEAL_SHARE = 0.02  # of all cores during one run
MIN_CORE_SPEED = 0.93  # of the fastest cores seen
SETTLE_S = 0.01  # OpenMP's threads spin for a while after their work: they must not do so beside the next contestant
_PROBE_SIZE = 512  # 1 MB matrices, in the caches; some 2 ms


class CoreProbe:
    """Speed of `num_threads` cores at arithmetic, in probes a second."""

    def __init__(self, num_threads: int) -> None:
        a, b = torch.randn(2, _PROBE_SIZE, _PROBE_SIZE).unbind()
        out = torch.empty_like(a)
        self._run = with_threads(lambda: torch.mm(a, b, out=out), num_threads)
        self.speeds: list[float] = []

    def __call__(self) -> float:
        self._run()  # wakes torch's threads and fills the caches
        self.speeds.append(1 / self._run())
        return self.speeds[-1]

    @property
    def best(self) -> float:
        """The best speed of nearly all probes: the last few percent are the clock's errors."""
        return statistics.quantiles(self.speeds, n=20)[-1] if len(self.speeds) > 1 else self.speeds[0]


class Run(NamedTuple):
    seconds: float
    steal_share: float
    core_speed: float  # the lower one of before and after

    def disturbed(self, best_core_speed: float) -> bool:
        return self.steal_share > MAX_STEAL_SHARE or self.core_speed < MIN_CORE_SPEED * best_core_speed


def observed(run: Stopwatch, probe: CoreProbe) -> Run:
    """Run once between two probes. /proc/stat counts in steps of 10 ms a core: in a run of less than a quarter second a
    single one is too much."""
    speed_before = probe()
    time.sleep(SETTLE_S)
    before = read_cpu_times()
    seconds = run()
    after = read_cpu_times()
    steal_share = after.stolen_share_since(before) if before and after else 0.0
    return Run(seconds, steal_share, min(speed_before, probe()))
