"""Keep all cores awake while something is timed.

A virtual machine's core that idles is lent to other guests, and is slow for milliseconds when it is wanted again. Lanes
that wait for each other idle often. On an EPYC's two cores, three emulated runs reached 59.4 to 61.7 tok/s with the
cores slowed in 50 to 85 % of the looks of `slowed`; with this, 61.5 to 61.8 and 20 to 38 %. A process on each core runs
at a priority below all others (`SCHED_IDLE`), so that whoever wants the core has it at once. It runs this file as a
script, which imports nothing of the harness. Time that the hypervisor takes from these processes counts as taken.
"""

from __future__ import annotations

import os
import sys
from subprocess import DEVNULL, Popen
from types import TracebackType


class Awake:
    """The processes that keep the cores awake until the block ends or this process does. There are none where they
    would slow what is timed: where two hyper-threads share a core, or where a quota limits what all processes take
    together; and none where the system has no such priority (anything but Linux)."""

    def __init__(self) -> None:
        self._processes = [
            Popen(
                [sys.executable, "-I", __file__, str(core), str(os.getpid())],
                stdin=DEVNULL, stdout=DEVNULL, stderr=DEVNULL,
            )
            for core in _cores()
        ]  # fmt: skip

    def __enter__(self) -> Awake:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()


def _cores() -> list[int]:
    from harness.hardware.slowed import can_watch
    from kernels.cpu import num_cores

    mine = sorted(os.sched_getaffinity(0)) if hasattr(os, "SCHED_IDLE") and can_watch() else []
    return mine if num_cores() >= len(mine) else []


def _stay_awake(core: int, parent: int) -> None:
    """Run on the core until the parent has ended."""
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    os.sched_setaffinity(0, {core})
    while os.getppid() == parent:
        for _ in range(100_000):
            pass


if __name__ == "__main__":
    _stay_awake(int(sys.argv[1]), int(sys.argv[2]))
