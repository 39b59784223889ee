"""Cores are kept awake by processes that give way to all others, that end in time, and that count as our own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable

import pytest
from psutil import STATUS_ZOMBIE, NoSuchProcess, Process

from harness.hardware import awake, slowed, steal
from harness.hardware.awake import Awake
from kernels import cpu

needs_linux = pytest.mark.skipif(not awake._cores(), reason="no such priority, hyper-threads of its own, or a quota")


def wait_for(condition: Callable[[], bool]) -> bool:
    until_s = time.monotonic() + 50
    while not condition() and time.monotonic() < until_s:
        time.sleep(0.01)
    return condition()


def has_ended(pid: int) -> bool:
    try:
        return bool(Process(pid).status() == STATUS_ZOMBIE)
    except NoSuchProcess:
        return True


@needs_linux
def test_a_process_of_the_lowest_priority_runs_on_each_core_until_the_block_ends():
    with Awake() as it:
        pids = [process.pid for process in it._processes]
        assert wait_for(lambda: all(os.sched_getscheduler(pid) == os.SCHED_IDLE for pid in pids))
        assert wait_for(lambda: sorted(map(os.sched_getaffinity, pids), key=min) == [{c} for c in own_cores()])

        def spent_s() -> float:
            return sum(Process(pid).cpu_times().user for pid in pids)

        before_s = spent_s()
        assert wait_for(lambda: spent_s() > before_s + 0.02), "they run where nobody else does"
        known_s = spent_s()
        assert steal._running_children_s() >= known_s, "what they spend is our own"
    assert all(map(has_ended, pids))


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
    assert pids and wait_for(lambda: all(map(has_ended, pids)))


def test_there_are_none_where_they_would_slow_what_is_timed(monkeypatch):
    monkeypatch.setattr(slowed, "can_watch", lambda: True)
    monkeypatch.setattr(cpu, "num_cores", lambda: len(own_cores()) - 1)
    assert awake._cores() == [], "a quota is used up by whoever runs"
    monkeypatch.setattr(cpu, "num_cores", lambda: len(own_cores()))
    assert awake._cores() == (own_cores() if hasattr(os, "SCHED_IDLE") else [])
    monkeypatch.setattr(slowed, "can_watch", lambda: False)
    assert awake._cores() == [], "hyper-threads slow each other"
