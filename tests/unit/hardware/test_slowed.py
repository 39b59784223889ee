"""Cores that others slow are found by a process that looks, and that ends when it is not wanted any more."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness.hardware import slowed
from harness.hardware.slowed import Looks, Watch

needs_linux = pytest.mark.skipif(not slowed.can_watch(), reason="hyper-threads of its own, or not Linux")


def test_the_share_is_that_of_the_looks_between():
    assert Looks(40, 12).slowed_share_since(Looks(20, 7)) == 0.25
    assert Looks(20, 7).slowed_share_since(Looks(20, 7)) == 0.0, "no looks tell nothing"


@pytest.fixture
def looked(monkeypatch, tmp_path):
    """Looks once for each of the given seconds of the loop; returns the counts and the cores that were looked at."""

    def run(loops_s: list[float]) -> tuple[Looks, list[int]]:
        seconds, cores = iter([each for second_s in loops_s for each in (9.0, second_s)]), []
        parents = iter([1] * len(loops_s) + [0])
        monkeypatch.setattr(slowed, "_loop_s", lambda: next(seconds))
        monkeypatch.setattr(slowed.time, "sleep", lambda _: None)
        monkeypatch.setattr(slowed.os, "nice", lambda _: None)
        monkeypatch.setattr(slowed.os, "getppid", lambda: next(parents))
        monkeypatch.setattr(slowed.os, "sched_getaffinity", lambda _: {5, 3}, raising=False)
        monkeypatch.setattr(slowed.os, "sched_setaffinity", lambda _, chosen: cores.extend(chosen), raising=False)
        counts = tmp_path / "counts"
        counts.write_bytes(slowed._COUNTS.pack(0, 0))
        slowed._look(str(counts), 1)
        return Looks(*slowed._COUNTS.unpack(counts.read_bytes())), cores

    return run


def test_a_loop_that_takes_a_quarter_more_than_a_short_one_was_slowed(looked):
    """The first look knows of no shorter one; the one that is 10 % longer is the machine's own scatter."""
    found, cores = looked([2.0, 1.0, 1.1, 1.3, 1.7, 1.0])
    assert found == Looks(6, 2)
    assert cores == [3, 5, 3, 5, 3, 5], "each core in turn"


def test_one_look_at_a_core_that_ran_faster_does_not_make_the_others_slow(looked):
    found, _ = looked([1.0] * 40 + [0.7] + [1.0] * 40)
    assert found == Looks(81, 0)


@needs_linux
def test_a_watch_looks_until_the_block_ends():
    with Watch() as cores:
        before, until_s = cores.read(), time.monotonic() + 20
        while cores.read().num < before.num + 5 and time.monotonic() < until_s:
            time.sleep(0.05)
        assert cores.read().num >= before.num + 5
        pid = cores._process.pid
    assert not Path(f"/proc/{pid}").exists()


@needs_linux
def test_a_watch_ends_with_the_process_that_wanted_it():
    code = "from harness.hardware.slowed import Watch; import os; print(Watch()._process.pid, flush=True); os._exit(0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=os.getcwd())
    looking, until_s = Path(f"/proc/{int(done.stdout)}/cmdline"), time.monotonic() + 20
    while looking.exists() and b"slowed" in looking.read_bytes() and time.monotonic() < until_s:
        time.sleep(0.05)
    assert not looking.exists() or b"slowed" not in looking.read_bytes()


def test_nothing_is_found_where_a_run_slows_its_own_threads(monkeypatch, tmp_path):
    siblings = tmp_path / "active"
    siblings.write_text("1\n")
    monkeypatch.setattr(slowed, "_SIBLINGS", siblings)
    with Watch() as cores:
        assert cores._process is None and cores.read() == Looks(0, 0)
