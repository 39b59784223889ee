"""The W&B view: an offline run read back from its own file, and clients that fail in every way."""

import json
import os
import signal
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from harness.config import ConfigError, parse
from harness.record.wandb_child import flat
from harness.record.wandb_sink import WandbConfig, WandbSink
from tests.kernels.eventually import GIVE_UP_S, eventually

ROOT = Path(__file__).parents[3]


def read_offline_file(path):
    """Records of a `.wandb` file: a LevelDB log (32 KiB blocks; crc, length, type before each piece) of protobufs."""
    from wandb.proto import wandb_internal_pb2

    data = path.read_bytes()
    assert data[:4] == b":W&B"
    position, pieces, records = 7, b"", []
    while position + 7 <= len(data):
        if 32768 - position % 32768 < 7:
            position += 32768 - position % 32768
            continue
        length, kind = struct.unpack("<xxxxHB", data[position : position + 7])
        pieces += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a whole record, or its last piece
            records.append(wandb_internal_pb2.Record.FromString(pieces))
            pieces = b""
    return records


def items(updates):
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in updates}


def test_an_offline_run_read_back(tmp_path):
    sink = WandbSink(WandbConfig(tags=("a", "b"), timeout_s=GIVE_UP_S), tmp_path)
    sink.start({"strategy": {"name": "moelens"}, "batch": 8}, {"experiment": "fig-11", "versions": {"torch": "2"}})
    assert sink.settle() is None
    for index in range(3):
        sink.log_pass({"index": index, "busy_s": {"gpu": 0.25 * index}, "mode": "normal", "fill": "x" * 20_000})
    (tmp_path / "trace.json").write_text('{"traceEvents": []}')
    told = sink.finish({"status": "ok", "utilization": {"gpu": 0.5}, "predicted": None}, tmp_path / "trace.json")
    assert told.startswith("offline: wandb sync ") and sink.warning is None
    assert Path(told.removeprefix("offline: wandb sync ")).is_relative_to(tmp_path)

    (path,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    records = read_offline_file(path)
    run = next(record.run for record in records if record.WhichOneof("record_type") == "run")
    assert (run.project, run.run_group, run.display_name) == ("moe-offload-harness", "fig-11", tmp_path.name)
    assert list(run.tags) == ["a", "b"]
    config = items(run.config.update)
    assert config["strategy"] == {"name": "moelens"} and config["batch"] == 8
    assert config["meta"]["versions"] == {"torch": "2"}
    rows = [items(record.history.item) for record in records if record.WhichOneof("record_type") == "history"]
    assert [(row["index"], row["busy_s/gpu"], row["_step"]) for row in rows] == [(0, 0.0, 0), (1, 0.25, 1), (2, 0.5, 2)]
    summary = {}
    for record in records:
        if record.WhichOneof("record_type") == "summary":
            summary |= items(record.summary.update)
    assert summary["utilization/gpu"] == 0.5 and summary["status"] == "ok" and "predicted" not in summary
    artifacts = [r.request.log_artifact.artifact if r.HasField("request") else r.artifact for r in records]
    names = [entry.path for artifact in artifacts for entry in artifact.manifest.contents]
    assert names == ["trace.json"]
    exits = [record.exit.exit_code for record in records if record.WhichOneof("record_type") == "exit"]
    assert exits == [0]


def test_nested_rows_become_sections_and_unknown_values_are_left_out():
    assert flat({"a": 1, "b": {"c": {"d": 2}, "e": None}, "f": [1, {"g": 2}]}) == {
        "a": 1,
        "b/c/d": 2,
        "f": [1, {"g": 2}],
    }


def test_disabled_does_nothing(tmp_path):
    sink = WandbSink(WandbConfig(mode="disabled"), tmp_path)
    sink.start({}, {})
    sink.settle()
    sink.log_pass({"index": 0})
    assert sink.finish({"status": "ok"}) == "disabled"
    assert not list(tmp_path.iterdir())


def test_the_configuration_is_checked():
    assert parse(WandbConfig, {"mode": "online", "tags": ["x"], "timeout_s": 5}).tags == ("x",)
    for field, value in (("mode", "sometimes"), ("timeout_s", 0), ("project", " "), ("tags", "x"), ("grup", "x")):
        with pytest.raises(ConfigError, match=rf"^wandb\.{field}"):
            parse(WandbConfig, {field: value}, "wandb")


# -- clients that fail ----------------------------------------------------------------------------------------------

WORKING = """
import os, time
class Settings:
    def __init__(self, **values): pass
class Artifact:
    def __init__(self, *a, **k): pass
    def add_file(self, *a, **k): pass
class Run:
    id, url, dir, summary = "1", None, "x/files", {}
    def log(self, row, step): LOG
    def log_artifact(self, a): ARTIFACT
    def finish(self, exit_code): FINISH
def init(**k):
    open(os.environ["WANDB_DATA_DIR"] + "/pid", "w").write(str(os.getpid()))
    INIT
    return Run()
"""

BROKEN = {
    "missing": ("raise ModuleNotFoundError(\"No module named 'wandb'\")", "not installed (pip install wandb"),
    "import error": ("1 / 0", "ZeroDivisionError: division by zero"),
    "unreachable": ("INIT=raise OSError('network is unreachable\\nat all')", "OSError: network is unreachable at all"),
    "exits": ("INIT=raise SystemExit(3)", "SystemExit: 3"),
    "crashes": ("INIT=os._exit(7)", "the client ended without an answer"),
    "hangs at the start": ("INIT=time.sleep(600)", "no answer within 1 s at the start"),
    "fails at a pass": ("LOG=raise OSError(28, 'No space left on device')", "No space left on device"),
    "hangs at a pass": ("LOG=time.sleep(600)", "no answer within 1 s at the end"),
    "fails at the artifact": ("ARTIFACT=raise ValueError('bad artifact')", "ValueError: bad artifact"),
    "hangs at the end": ("FINISH=time.sleep(600)", "no answer within 1 s at the end"),
    "talks": ("INIT=print('chatter', flush=True)", None),
}


def fake_client(folder, fault, monkeypatch):
    """A module `wandb` that works but for the fault: `PLACE=statement`, or all that the module says."""
    place, _, statement = fault.partition("=")
    faults = {"INIT": "pass", "LOG": "pass", "ARTIFACT": "pass", "FINISH": "pass"}
    source = WORKING if place in ("", *faults) else fault
    for name, working in faults.items():
        source = source.replace(name, statement if name == place else working)
    folder.mkdir()
    (folder / "wandb.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", str(folder))


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_client_costs_a_warning_and_no_more(tmp_path, monkeypatch, name):
    """Whoever waits for one that hangs does so for longer than pytest lets it."""
    source, reason = BROKEN[name]
    fake_client(tmp_path / "fake", source, monkeypatch)
    folder = tmp_path / "run"
    folder.mkdir()
    # Hangs are bounded tightly; where the client answers, it gets the time that a busy machine may need.
    hangs, short, patient = name.startswith("hangs"), WandbConfig(timeout_s=1.0), WandbConfig(timeout_s=GIVE_UP_S)
    sink = WandbSink(short if name == "hangs at the start" else patient, folder)
    sink.start({"a": 1}, {})
    sink.settle()
    sink._config = short if hangs else patient
    for index in range(2000):
        sink.log_pass({"index": index, "fill": "x" * 200})  # more than a pipe holds: must not block
    told = sink.finish({"status": "ok"}, folder / "trace.json")
    if reason is None:
        assert told.startswith("offline: ") and sink.warning is None
    else:
        assert told == f"not recorded: {sink.warning}"
        assert reason in sink.warning and "\n" not in sink.warning
    pid = folder / "wandb" / "pid"
    written = pid.read_text() if pid.exists() else ""  # nothing where it was ended before it had written
    assert not written or not is_running(int(written))


def test_a_folder_that_cannot_be_written_costs_a_warning(tmp_path):
    sink = WandbSink(WandbConfig(), tmp_path / "missing" / "run")
    sink.start({}, {})
    sink.log_pass({"index": 0})
    assert sink.finish({"status": "ok"}).startswith("not recorded: W&B: cannot start the client")


def test_finishing_without_a_start(tmp_path):
    assert WandbSink(WandbConfig(), tmp_path).finish({}) == "not recorded: never started"


def test_an_account_that_is_missing_is_one_line(tmp_path, monkeypatch):
    """The real client, online, without a key."""
    for name in ("WANDB_API_KEY", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    sink = WandbSink(WandbConfig(mode="online", timeout_s=GIVE_UP_S), tmp_path)
    sink.start({}, {})
    assert "API key" in sink.settle() and "\n" not in sink.warning


def test_the_client_ends_with_a_killed_run(tmp_path, monkeypatch):
    fake_client(tmp_path / "fake", "", monkeypatch)
    script = """
import os, signal, sys
from pathlib import Path
from harness.record.wandb_sink import WandbConfig, WandbSink
sink = WandbSink(WandbConfig(timeout_s=120.0), Path(sys.argv[1]))
sink.start({}, {})
assert sink.settle() is None
os.kill(os.getpid(), signal.SIGKILL)
"""
    path = os.pathsep.join((str(ROOT), os.environ["PYTHONPATH"]))
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], env={**os.environ, "PYTHONPATH": path}, check=False
    )
    assert done.returncode == -signal.SIGKILL
    pid = int((tmp_path / "wandb" / "pid").read_text())
    eventually(lambda: not is_running(pid))
