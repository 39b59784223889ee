"""Who disturbs whom on one computer: real processes, as two terminals would start them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from shutil import rmtree
from typing import Any

import pytest
from rich.console import Console

from harness.machine.build import load_machine
from harness.machine.turn import Turn
from harness.record.files import read_json
from harness.record.terminal import print_summary
from harness.run.experiment import run_experiment
from harness.run.report import disturbed
from tests.composing import composed
from tests.conftest import ROOT

# Has its turn from "taken" until a line comes in, then says who else had one.
RUN = """
import sys
from harness.machine.turn import Turn
with Turn("emulated", sys.argv[1], exclusive=sys.argv[2] == "exclusive") as turn:
    print("taken", flush=True)
    sys.stdin.readline()
    print(*turn.beside(), sep=" + ", flush=True)
"""
Run = subprocess.Popen[str]


@pytest.fixture
def runs(tmp_path, monkeypatch) -> Iterator[list[Run]]:
    monkeypatch.setenv("MOE_HARNESS_LOCKS", str(tmp_path / "locks"))
    started: list[Run] = []
    yield started
    for run in started:
        run.kill()
        run.communicate()


def start(runs: list[Run], *arguments: str) -> Run:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    runs.append(subprocess.Popen([sys.executable, *arguments], cwd=ROOT, text=True, **pipes))
    return runs[-1]


def turn(runs: list[Run], name: str, how: str = "exclusive") -> Run:
    return start(runs, "-c", RUN, name, how)


def under_way(run: Run) -> Run:
    assert run.stdout.readline() == "taken\n", run.stderr.read()
    return run


def ended(run: Run) -> str:
    """Whom it saw beside it. It has nothing more to say on stderr."""
    told, complaint = run.communicate("\n")
    assert complaint == ""
    return told.strip()


def test_a_second_run_says_for_whom_it_waits_and_goes_on_when_that_one_ends(runs):
    first = under_way(turn(runs, "strategy moelens"))
    second = turn(runs, "strategy flexgen")
    holder = rf"waiting for another emulated run \(pid {first.pid}, strategy moelens\) on this machine"
    assert re.fullmatch(rf"{holder}; exclusive=false runs at once, disturbed\n", second.stderr.readline())
    assert ended(first) == ""
    under_way(second)
    assert ended(second) == "", "and one line was enough"


def test_a_killed_holder_holds_nobody_up(runs, tmp_path):
    first = under_way(turn(runs, "killed"))
    second = turn(runs, "waiting")
    assert "waiting" in second.stderr.readline()
    first.kill()
    under_way(second)
    assert ended(second) == "", "the dead one disturbs nobody"
    assert not list((tmp_path / "locks").glob("*.run")), "and what it left is gone"


def test_runs_that_do_not_wait_know_each_other_and_are_waited_for(runs):
    calm = under_way(turn(runs, "calm"))
    hasty = [under_way(turn(runs, name, "at once")) for name in ("hasty", "hastier")]
    last = turn(runs, "last")
    assert "calm" in last.stderr.readline()
    names = [f"pid {run.pid}, {name}" for run, name in zip([calm, *hasty], ("calm", "hasty", "hastier"), strict=True)]
    assert ended(calm) == f"{names[1]} + {names[2]}"
    assert ended(hasty[0]) == f"{names[0]} + {names[2]}"
    assert ended(hasty[1]) == f"{names[0]} + {names[1]}"
    under_way(last)
    assert ended(last) == ""


def test_each_resource_has_turns_of_its_own(runs):
    with Turn("cuda-1", "one GPU") as one, Turn("cuda-2", "another GPU") as another:
        assert one.beside() == another.beside() == []


def test_a_run_whose_lock_file_is_gone_may_be_disturbed(tmp_path, monkeypatch):
    monkeypatch.setenv("MOE_HARNESS_LOCKS", str(tmp_path / "locks"))
    with Turn("emulated", "first") as first:
        rmtree(tmp_path / "locks")
        with Turn("emulated", "second", tell=pytest.fail) as second:
            assert second.beside() == []
        assert disturbed(first.beside(), None, None) == "anyone (its lock file is gone) ran beside it"


def test_locks_that_cannot_be_written_cost_a_warning(tmp_path, monkeypatch):
    (tmp_path / "locks").write_text("a file where the folder should be")
    monkeypatch.setenv("MOE_HARNESS_LOCKS", str(tmp_path / "locks"))
    told = []
    with Turn("emulated", "alone", tell=told.append) as alone:
        assert alone.beside() == []
    assert told == [f"warning: {alone.warning}"] and "runs beside this one cannot be seen" in alone.warning


def test_only_machines_whose_times_are_real_take_turns():
    loaded = {
        name: load_machine(composed(f"machine={name}")["machine"]) for name in ("emulated", "simulated", "shuffled")
    }
    assert {name for name, machine in loaded.items() if machine.resource is not None} == {"emulated"}
    with loaded["simulated"].turn("of a virtual clock", exclusive=True) as nobody:
        assert nobody is None


def smoke(folder: Path, *overrides: str) -> dict[str, Any]:
    quiet = ("wandb.mode=disabled", "progress=false", "verify=off", f"results_dir={folder}")
    return composed("experiment=smoke", "machine=emulated", "dataset.num_requests=2", *quiet, *overrides)


def test_a_run_waits_before_it_does_anything_and_can_be_interrupted_then(runs, tmp_path, monkeypatch):
    under_way(turn(runs, "strategy moelens"))

    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_experiment(smoke(tmp_path / "results"))
    assert not (tmp_path / "results").exists()


def test_runs_beside_each_other_are_labelled_disturbed(runs, tmp_path, capfd):
    first = under_way(turn(runs, "strategy flexgen"))
    summary, folder = run_experiment(smoke(tmp_path, "exclusive=false"))
    assert f"pid {first.pid}, strategy flexgen ran beside it" in summary["disturbed"]
    assert read_json(folder / "summary.json")["disturbed"] == summary["disturbed"]
    print_summary(summary, folder, Console(width=120))
    assert re.search(r"disturbed +pid \d+, strategy flexgen ran beside it", capfd.readouterr().out)
    assert ended(first) == f"pid {os.getpid()}, strategy moelens"


@pytest.mark.parametrize(
    ("others", "absent", "is_disturbed"),
    [
        (0.5, 0.3, True),
        (0.5, 0.01, False),
        (0.02, 0.17, False),
        (0.5, None, False),
        (None, 0.5, False),
        (0.04, 0.03, True),
    ],
)
def test_cores_that_others_had_count_where_the_gpu_lane_missed_them(others, absent, is_disturbed):
    reason = disturbed([], others, absent)
    assert (reason is not None) == is_disturbed
    assert not is_disturbed or reason.startswith(f"others had {others:.0%} of the cores")
