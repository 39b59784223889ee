"""Stages in processes of their own, so that a crash, a hang or a device that has failed takes no others along.

A process tells by its exit code that it came to its end, whatever its stages found; `gpu.json` tells what it was at.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from benchmarks.gpu_stages.record import Record

GROUPS = (
    ("build", "tests", "kernels", "ceilings", "tokens"),
    ("memory", "stream", "loop", "steady", "strategies", "calibrate", "simulate"),
    ("peer",),
)
DEVICE_LOST = 3  # exit code of a process whose device has failed: what is left is for another one
_RESERVED_S = {"calibrate": 75.0, "simulate": 40.0, "peer": 110.0}  # kept from the strategies, which take what they get
_ENDS_WITH_PROCESS = ("memory",)  # stages that another process has to do again for those behind them
_GRACE_S = 15.0  # behind the budget, for a process to end by itself
_LEAST_S = 5.0

Command = Callable[[Sequence[str], float], list[str]]  # stages and seconds -> command line


def run_in_processes(stages: Sequence[str], record: Record, command: Command) -> None:
    """Run all stages in the order of `GROUPS`. After a process that broke off, another one does what was left undone.
    Each gets further, since the item at which a process broke off counts as done."""
    for group in GROUPS:
        left = [stage for stage in group if stage in stages]
        later = [stage for stage in stages if stage not in group] if {"steady", "strategies"} & set(left) else []
        while left and (left_s := record.left_s - reserved_s(later, record.left_s)) >= _LEAST_S:
            ended = _run(command(left, left_s), left_s + _GRACE_S)
            record.reload()
            undone = record.broken_off(left, ended) if ended else []
            left = [*(stage for stage in left if undone and stage in _ENDS_WITH_PROCESS), *undone]


def reserved_s(stages: Iterable[str], left_s: float) -> float:
    """Return the seconds to keep for these stages, at most a third of the time left, while earlier ones take all they
    get."""
    return min(sum(_RESERVED_S.get(stage, 0.0) for stage in stages), left_s / 3)


def _run(command: list[str], timeout_s: float) -> str | None:
    """Run a process; return None if it came to its end, else how it ended. What it started and left behind ends with
    it: that may hold the GPU."""
    process = subprocess.Popen(command, start_new_session=True)
    try:
        code = process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return "the process did not end within its time"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):  # a process that waits for its device may not even be killed
            process.wait(_GRACE_S)
    if code == DEVICE_LOST:
        return "the device has failed"
    return None if code == 0 else f"the process ended by {signal.Signals(-code).name if code < 0 else f'code {code}'}"
