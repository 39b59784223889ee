"""Cores are kept awake by processes that give way to all others, that end in time, and that count as our own."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest
from psutil import Process, pid_exists

from harness.hardware.awake import Awake
from harness.hardware.steal import read_cpu_times

needs_linux = pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="not Linux")


def wait_for(condition) -> bool:
    until_s = time.monotonic() + 20
    while not condition() and time.monotonic() < until_s:
        time.sleep(0.01)
    return condition()


@needs_linux
def test_a_process_of_the_lowest_priority_runs_on_each_core_until_the_block_ends():
    with Awake() as awake:
        pids = [process.pid for process in awake._processes]
        assert wait_for(lambda: all(os.sched_getscheduler(pid) == os.SCHED_IDLE for pid in pids))
        assert wait_for(lambda: sorted(map(os.sched_getaffinity, pids), key=min) == [{c} for c in own_cores()])
        before = read_cpu_times()
        assert wait_for(lambda: sum(Process(pid).cpu_times().user for pid in pids) > 0.5)
        after = read_cpu_times()
        spent_s = after.own_s - before.own_s
        assert spent_s > 0.3, "they are our own, and nobody has taken what they spent"
    assert not any(map(pid_exists, pids))


def own_cores() -> list[int]:
    return sorted(os.sched_getaffinity(0))


@needs_linux
def test_they_end_with_their_parent():
    code = (
        "import os, time; from harness.hardware.awake import Awake; it = Awake();"
        "print(*[p.pid for p in it._processes], flush=True); os._exit(0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    pids = list(map(int, done.stdout.split()))
    assert pids and wait_for(lambda: not any(map(pid_exists, pids)))
