"""Whether the process behind a run still lives, and what becomes of what dead ones left."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from datetime import UTC, datetime

import psutil
import pytest

from harness.record.files import read_json, write_json
from harness.record.owner import SILENT_AFTER_S, current_owner
from harness.record.store import RunFolder, read_run
from tests.kernels.eventually import eventually


def make(tmp_path, name="run", **meta):
    return RunFolder.create(tmp_path, name, {"strategy": "s"}, meta)


def write_status(folder, **changes):
    path = folder.path / "status.json"
    write_json(path, {**read_json(path), **changes})


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({}, "running"),
        ({"boot_id": "an-earlier-boot"}, "interrupted"),
        ({"process_started": 1.0}, "interrupted"),  # the number was given to another process
        ({"pid": 2**22 + 1}, "interrupted"),
        ({"process_started": "12345"}, "interrupted"),  # as older versions had it
        ({"host": "elsewhere", "pid": 2**22 + 1}, "running"),  # cannot be seen from here, and has just written
    ],
)
def test_running_counts_only_while_the_owner_lives(tmp_path, changes, status):
    folder = make(tmp_path)
    write_status(folder, **changes)
    assert read_run(folder.path).status == status


def test_a_run_on_another_host_ends_with_its_last_sign_of_life(tmp_path):
    """Containers have a new name each time: nobody will ever see their processes again."""
    folder = make(tmp_path)
    write_status(folder, host="a-container", pid=1)
    folder.append_pass({"index": 0})
    long_ago_s = time.time() - 2 * SILENT_AFTER_S
    for path in (*folder.path.iterdir(), folder.path):
        os.utime(path, (long_ago_s, long_ago_s))
    run = read_run(folder.path)
    assert run.status == "interrupted"
    assert "on a-container" in run.error and datetime.fromtimestamp(long_ago_s, UTC).isoformat()[:19] in run.error
    folder.append_pass({"index": 1})
    alive = read_run(folder.path)
    assert (alive.status, alive.error) == ("running", None)


def test_what_killed_runs_left_half_written_goes_with_the_next_run(tmp_path):
    dead, alive = make(tmp_path), make(tmp_path)
    write_status(dead, pid=2**22 + 1)
    for folder in (dead, alive):
        (folder.path / ".summary.json.17.tmp").write_text("half")
    new, newer, own = (tmp_path / "runs" / f".new-{name}" for name in ("old", "young", "dead"))
    for folder in (new, newer, own):
        folder.mkdir()
    os.utime(new, (1.0, 1.0))
    shutil.copy(dead.path / "status.json", own)
    shutil.copy(alive.path / "status.json", newer)
    make(tmp_path)
    assert not new.exists() and not own.exists() and newer.exists()
    assert not (dead.path / ".summary.json.17.tmp").exists() and (alive.path / ".summary.json.17.tmp").exists()
    assert read_run(dead.path).config == read_run(alive.path).config


def test_a_zombie_owner_is_dead(tmp_path):
    folder = make(tmp_path)
    child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    started = psutil.Process(child.pid).create_time()
    write_status(folder, **{**current_owner(), "pid": child.pid, "process_started": started})
    assert read_run(folder.path).status == "running"
    child.stdin.close()
    eventually(lambda: psutil.Process(child.pid).status() == psutil.STATUS_ZOMBIE)
    assert read_run(folder.path).status == "interrupted"
    child.wait()
