"""Run folders under everything that can go wrong: kills at any moment, torn lines, full disks, taken names."""

import os
import random
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from harness.config import ConfigError
from harness.interrupts import Terminated
from harness.record.files import JsonLines, RecordError, plain
from harness.record.store import RunFolder, list_runs, read_run, run_id
from tests.kernels.eventually import GIVE_UP_S

CONFIG = {"strategy": {"name": "moelens", "n_real": 200}, "model": {"name": "mixtral-mini"}, "dataset": "mtbench"}
ROOT = Path(__file__).parents[3]


def make(tmp_path, name="run", **meta):
    return RunFolder.create(tmp_path, name, CONFIG, meta)


# -- round trips ----------------------------------------------------------------------------------------------------


def test_what_is_written_is_read(tmp_path):
    with RunFolder.create(tmp_path / "new" / "results", "moelens-x", CONFIG, {"torch": "2.13"}) as folder:
        folder.append_pass({"index": 0, "busy_s": {"gpu": np.float64(0.5)}, "rate": float("nan")})
        folder.append_pass({"index": 1})
        folder.append_request({"id": 7, "text": "zwölf\nlines", "path": Path("a/b")})
        assert read_run(folder.path).status == "running"
        assert read_run(folder.path).summary is None
        folder.write_summary({"status": "ok", "throughput_tok_s": 12.5})
        folder.finish("ok")
    run = read_run(folder.path)
    assert folder.path == tmp_path / "new" / "results" / "runs" / "moelens-x"
    assert run.config == CONFIG
    assert run.meta == {"run_id": "moelens-x", "torch": "2.13"}
    assert run.passes == [{"index": 0, "busy_s": {"gpu": 0.5}, "rate": None}, {"index": 1}]
    assert run.requests == [{"id": 7, "text": "zwölf\nlines", "path": "a/b"}]
    assert (run.status, run.error, run.summary) == ("ok", None, {"status": "ok", "throughput_tok_s": 12.5})


def test_text_that_utf8_has_no_bytes_for_is_recorded(tmp_path):
    """A file name whose bytes are no UTF-8 has a lone surrogate for each."""
    name = os.fsdecode(b"M\xfcller.jsonl")
    with RunFolder.create(tmp_path, "run", CONFIG, {"path": name}) as folder:
        folder.append_request({"id": 7, "path": name})
        folder.write_summary({"data_source": name})
        folder.finish("failed", name)
    run = read_run(folder.path)
    assert run.meta["path"] == run.requests[0]["path"] == run.summary["data_source"] == run.error == name


def test_plain_data_is_json_and_keeps_values():
    @dataclass
    class Pair:
        left: object
        right: object

    value = {"pair": Pair(np.int16(3), (1, {2})), "array": np.array([[1, 2]]), "flag": np.bool_(True), 4: float("inf")}
    assert plain(value) == {"pair": {"left": 3, "right": [1, [2]]}, "array": [[1, 2]], "flag": True, "4": None}


# -- names ----------------------------------------------------------------------------------------------------------


def test_the_same_inputs_give_the_same_readable_id():
    first = run_id({**CONFIG, "machine": {"name": "emulated"}}, "abc", {"cpu": "x"})
    assert first.startswith("moelens-mixtral-mini-mtbench-emulated-")
    reordered = {key: CONFIG[key] for key in reversed(CONFIG)}
    assert run_id({"machine": {"name": "emulated"}, **reordered}, "abc", {"cpu": "x"}) == first
    assert (
        run_id({**CONFIG, "machine": {"name": "emulated"}, "results_dir": "/elsewhere"}, "abc", {"cpu": "x"}) == first
    )


def test_any_other_input_gives_another_id():
    base = run_id(CONFIG, "abc", "laptop")
    deeper = {**CONFIG, "strategy": {"name": "moelens", "n_real": 201}}
    others = [run_id(deeper, "abc", "laptop"), run_id(CONFIG, "abd", "laptop"), run_id(CONFIG, "abc", "server")]
    assert len({base, *others}) == 4


def test_an_id_is_a_file_name_whatever_the_names_are():
    name = run_id({"strategy": "../up", "model": {"name": "org/model 8x7B"}, "dataset": None}, "c", "h")
    assert "/" not in name and " " not in name and not name.startswith(".")


def test_a_taken_name_gets_a_suffix_and_nothing_is_lost(tmp_path):
    for expected in ("run", "run-2", "run-3"):
        with make(tmp_path) as folder:
            assert folder.run_id == expected
            folder.append_pass({"by": expected})
            folder.finish("ok")
    assert [run.passes for run in list_runs(tmp_path)] == [[{"by": name}] for name in ("run", "run-2", "run-3")]
    assert [run.meta["run_id"] for run in list_runs(tmp_path)] == ["run", "run-2", "run-3"]


def test_two_at_once_never_share_a_folder(tmp_path):
    made, barrier = [], threading.Barrier(8)

    def create():
        barrier.wait()
        made.extend(make(tmp_path).run_id for _ in range(4))

    threads = [threading.Thread(target=create) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(made) == sorted(["run", *(f"run-{n}" for n in range(2, 33))])


# -- status ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (KeyboardInterrupt(), "interrupted", "interrupted"),
        (Terminated(), "interrupted", "terminated"),
        (ValueError("no such expert"), "failed", "ValueError: no such expert"),
    ],
)
def test_an_error_sets_the_status_and_goes_on(tmp_path, error, status, text):
    with pytest.raises(type(error)), make(tmp_path) as folder:
        raise error
    run = read_run(folder.path)
    assert run.status == status and text in run.error


def test_leaving_without_a_result_is_a_failure(tmp_path):
    with make(tmp_path) as folder:
        pass
    assert read_run(folder.path).status == "failed"


# -- kills ----------------------------------------------------------------------------------------------------------

WRITER = """
import sys
from harness.record.store import RunFolder
folder = RunFolder.create(sys.argv[1], "killed", {"strategy": "s", "text": "x" * 5000}, {"versions": list(range(500))})
for number in range(10**9):
    if number == 1:
        print("ready", flush=True)
    folder.append_pass({"index": number, "fill": "p" * (number * 7919 % 60_000), "end": number})
    folder.append_request({"id": number, "fill": "r" * (number * 104729 % 9_000), "end": number})
    folder.write_summary({"number": number, "fill": ["s"] * 3000, "end": number})
"""

CREATOR = """
import sys
from harness.record.store import RunFolder
for number in range(10**9):
    if number == 2:
        print("ready", flush=True)
    folder = RunFolder.create(sys.argv[1], "killed", {"strategy": "s"}, {"versions": list(range(500))})
    folder.append_pass({"index": 0})
    folder.finish("ok")
"""


def kill_in_the_middle(script, folder, delay_s):
    command = [sys.executable, "-c", script, str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert select.select([process.stdout], [], [], GIVE_UP_S)[0] and process.stdout.readline() == b"ready\n"
    time.sleep(delay_s)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()


@pytest.mark.parametrize("seed", range(4))
def test_a_kill_in_mid_write_leaves_everything_readable(tmp_path, seed):
    kill_in_the_middle(WRITER, tmp_path, 0.02 + 0.2 * random.Random(seed).random())
    (run,) = list_runs(tmp_path)
    assert run.status == "interrupted"
    assert run.config["text"] == "x" * 5000 and run.meta["versions"] == list(range(500))
    assert [row["index"] for row in run.passes] == [row["end"] for row in run.passes] == list(range(len(run.passes)))
    assert [row["id"] for row in run.requests] == list(range(len(run.requests)))
    assert len(run.passes) - len(run.requests) in (0, 1)
    assert len(run.requests) > 0
    written = -1 if run.summary is None else run.summary["end"]
    assert len(run.requests) - 1 - written in (0, 1)


def test_a_kill_while_folders_are_made_leaves_whole_folders(tmp_path):
    kill_in_the_middle(CREATOR, tmp_path, 0.15)
    runs = list_runs(tmp_path)
    assert len(runs) > 1
    assert all(run.config == {"strategy": "s"} and run.meta["versions"] == list(range(500)) for run in runs)
    assert {run.status for run in runs} <= {"ok", "interrupted"}


# -- damaged files and full disks -----------------------------------------------------------------------------------

FILES = {"config.yaml": "config", "meta.json": "meta", "status.json": "status", "summary.json": "summary"}


@pytest.mark.parametrize("tail", [b"{", b'{"index": 2', b'{"index": 2}', b"\xff\xfe"])
def test_a_torn_last_line_is_left_out(tmp_path, tail):
    folder = make(tmp_path)
    folder.append_pass({"index": 0})
    folder.append_pass({"index": 1})
    folder.close()
    with (folder.path / "passes.jsonl").open("ab") as file:
        file.write(tail)
    assert read_run(folder.path).passes == [{"index": 0}, {"index": 1}]


def test_a_corrupt_line_in_the_middle_is_named(tmp_path):
    folder = make(tmp_path)
    (folder.path / "passes.jsonl").write_text('{"index": 0}\n{"ind\n{"index": 2}\n')
    with pytest.raises(RecordError, match=r"passes\.jsonl: line 2 is corrupt"):
        read_run(folder.path).passes  # noqa: B018


def test_damaged_files_are_named(tmp_path):
    folder = make(tmp_path)
    for name in ("config.yaml", "meta.json", "status.json", "summary.json"):
        (folder.path / name).write_text("{")
    run = read_run(folder.path)
    for field, name in (
        ("config", "config.yaml"),
        ("meta", "meta.json"),
        ("status", "status.json"),
        ("summary", "summary"),
    ):
        with pytest.raises(RecordError, match=name):
            getattr(run, field)
    with pytest.raises(RecordError, match="not a run folder"):
        read_run(tmp_path)


YAML_BOMB = "a: &a [x, x]\n" + "".join(f"{b}: &{b} [*{a}, *{a}]\n" for a, b in pairwise("abcdefghijklmnopqrstuvwxyz"))


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        *((name, content, "must hold named values") for name in FILES for content in ("[1]", '"text"', "null", "3")),
        *((name, "[" * 100_000, "cannot be read: ") for name in FILES),
        *((name, "9" * 5000, "cannot be read: Exceeds the limit") for name in FILES),
        *((name, '{"a": NaN}', "cannot be read: NaN is no JSON") for name in FILES if name != "config.yaml"),
        ("config.yaml", "", "must hold named values, got nothing"),
        ("config.yaml", YAML_BOMB, "cannot be read: it has the alias *a"),
        ("config.yaml", "a: !!python/object/apply:os.getpid []", "could not determine a constructor"),
        ("status.json", "{}", "status must be one of running, ok, oom, failed, interrupted, got None"),
        ("status.json", '{"status": "running", "pid": "x"}', "pid must be a whole number, got 'x'"),
        ("status.json", '{"status": "running", "pid": null}', "pid must be a whole number, got None"),
    ],
)
def test_a_file_of_another_kind_is_named(tmp_path, name, content, told):
    folder = make(tmp_path)
    (folder.path / name).write_text(content)
    with pytest.raises(RecordError) as caught:
        getattr(read_run(folder.path), FILES[name])
    text = str(caught.value)
    assert text.startswith(f"{folder.path / name}: ") and told in text and "\n" not in text


@pytest.mark.parametrize("name", ["config.yaml", "meta.json", "summary.json"])
def test_what_could_be_read_for_ever_is_not_read(tmp_path, name):
    path = make(tmp_path).path / name
    path.unlink(missing_ok=True)
    with path.open("wb") as file:
        file.truncate(2**40)  # a hole: it takes no place on the disk
    with pytest.raises(RecordError, match=rf"{name}: cannot be read: it has 1,099,511,627,776 bytes"):
        getattr(read_run(path.parent), FILES[name])
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(RecordError, match=rf"{name}: cannot be read: it is no regular file"):
        getattr(read_run(path.parent), FILES[name])


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_ends_with_the_cause(tmp_path):
    folder = make(tmp_path)
    (folder.path / "passes.jsonl").symlink_to("/dev/full")
    with pytest.raises(RecordError, match=r"passes\.jsonl: cannot be written: No space left on device"), folder:
        folder.append_pass({"index": 0})
    run = read_run(folder.path)
    assert run.status == "failed" and "No space left on device" in run.error


def test_a_file_that_cannot_be_opened_is_named(tmp_path):
    with pytest.raises(RecordError, match="gone/passes.jsonl: cannot be written: No such file"):
        JsonLines(tmp_path / "gone" / "passes.jsonl")


def test_what_was_half_written_is_taken_back(tmp_path):
    """The kernel writes a part of the line and refuses the rest, as on a disk that fills up."""
    folder = make(tmp_path)
    folder.append_pass({"index": 0})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.raises(RecordError, match=r"passes\.jsonl: cannot be written: File too large"):
            folder.append_pass({"index": 1, "fill": "x" * 20_000})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    folder.append_pass({"index": 2})  # there is room again
    assert read_run(folder.path).passes == [{"index": 0}, {"index": 2}]


def test_a_disk_too_full_for_the_status_does_not_hide_the_error(tmp_path, monkeypatch):
    folder = make(tmp_path)
    with pytest.raises(ValueError, match="the real cause") as caught, folder:
        (folder.path / "status.json").write_text("{")
        raise ValueError("the real cause")
    assert "could not be recorded" in caught.value.__notes__[0]


def test_a_failed_summary_leaves_the_old_one(tmp_path):
    folder = make(tmp_path)
    folder.write_summary({"number": 1})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.raises(RecordError, match=r"summary\.json"):
            folder.write_summary({"number": 2, "fill": "x" * 20_000})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert read_run(folder.path).summary == {"number": 1}
    assert not list(folder.path.glob(".*"))


@pytest.mark.parametrize("where", ["file/below", "/proc/nowhere"])
def test_an_unwritable_results_dir_is_named(tmp_path, where):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="results_dir: cannot write to") as caught:
        make(tmp_path / where)
    assert caught.value.field == "results_dir" and "\n" not in str(caught.value)


def test_files_are_utf8_whatever_the_users_locale(tmp_path):
    program = """
import sys
from harness.record.store import RunFolder
RunFolder.create(sys.argv[1], "run-1", {"dataset": {"path": "Prüfung/µ.jsonl"}}, {"source": "µ"}).finish("ok")
"""
    ascii_only = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": ""}
    (tmp_path / "program.py").write_text(program, encoding="utf-8")
    command = [sys.executable, str(tmp_path / "program.py"), str(tmp_path / "results")]
    subprocess.run(command, check=True, env={**ascii_only, "PYTHONPATH": str(ROOT)}, timeout=60)
    (run,) = list_runs(tmp_path / "results")
    assert run.config["dataset"]["path"] == "Prüfung/µ.jsonl" and run.meta["source"] == "µ"
