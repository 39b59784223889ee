"""The W&B view: an offline run read back from its own file, and clients that fail in every way."""

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from offline_file import read_offline_file

from harness.config import ConfigError, parse
from harness.record import wandb_sink
from harness.record.store import read_run
from harness.record.wandb_child import flat
from harness.record.wandb_rows import PassRows
from harness.record.wandb_sink import WandbConfig, WandbSink
from harness.run.experiment import run_experiment
from tests.composing import composed
from tests.kernels.eventually import GIVE_UP_S, eventually

ROOT = Path(__file__).parents[3]


def test_an_offline_run_read_back(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = Path("my $runs/r-1")  # a shell would split it, and put in a variable
    folder.mkdir(parents=True)
    sink = WandbSink(WandbConfig(tags=("a", "emulated"), timeout_s=GIVE_UP_S), folder)
    groups = {name: {"name": name} for name in ("strategy", "model", "dataset")} | {"machine": {"name": "emulated"}}
    sink.start({**groups, "batch": 8}, {"experiment": "fig-11", "versions": {"torch": "2"}})
    assert sink.settle() is None
    for index in range(3):
        row = {"index": index, "busy_s": {"gpu": 0.25 * index}, "generated_tokens": index, "fill": "x" * 20_000}
        sink.log_pass(row)
    (folder / "trace.json").write_text('{"traceEvents": []}')
    requests = [{"request_id": 0, "generated_text": "some"}, {"request_id": 1, "generated_text": None}]
    told = sink.finish({"status": "ok", "generated_tokens": 9, "predicted": None}, folder / "trace.json", requests)

    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    assert shlex.split(told) == ["offline:", "wandb", "sync", str(path.parent)]
    assert not path.is_absolute() and sink.warning is None
    found = read_offline_file(path)
    assert (found.run.project, found.run.display_name) == ("moe-offload-harness", "r-1")
    assert (found.run.run_group, found.run.job_type) == ("fig-11", "run")
    assert list(found.run.tags) == ["a", "emulated", "strategy", "model", "dataset"]
    assert found.config["strategy"] == {"name": "strategy"} and found.config["batch"] == 8
    assert found.config["meta"]["versions"] == {"torch": "2"}
    rows = [(row["pass/index"], row["pass/busy_s/gpu"]) for row in found.history if "pass/index" in row]
    assert rows == [(0, 0.0), (1, 0.25), (2, 0.5)]
    assert {"pass/index", "pass/*"} <= found.steps.keys() and found.steps["pass/*"] == "pass/index"
    table = found.summary.pop("requests")
    assert found.summary == {"status": "ok", "generated_tokens": 9}, "nothing of a pass, and not the last one's tokens"
    assert json.loads((path.parent / "files" / table["path"]).read_text())["data"] == [[0, "some"], [1, None]]
    assert "trace.json" in found.artifact_files and found.exit_code == 0
    assert b"/home" not in (text := path.read_bytes()) and str(Path(sys.executable)).encode() not in text


def test_w_and_b_is_told_what_summary_json_says(tmp_path):
    """A whole run, its numbers as a server would have them after `wandb sync`, field by field."""
    overrides = ("experiment=smoke", "wandb.mode=offline", f"wandb.timeout_s={GIVE_UP_S}", "dataset.num_requests=5")
    values = composed(*overrides, "progress=false", f"results_dir={tmp_path}", "experiment.name=none")
    told, folder = run_experiment(values, sweep="20260102-030405")
    summary = json.loads((folder / "summary.json").read_text())
    assert summary.pop("wandb") == told["wandb"]
    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    found = read_offline_file(path)
    found.summary.pop("requests")
    assert found.summary == flat(summary)
    different = ("generated_tokens", "throughput_tok_s", "processed_tok_s", "num_finished", "wall_s")
    assert len({found.summary[name] for name in different}) == len(different), "or one would pass for another"
    assert (found.run.run_group, found.run.job_type) == ("sweep 20260102-030405", "sweep")

    passes = read_run(folder).passes
    rows = [row for row in found.history if "pass/index" in row]
    assert [row["pass/generated_tokens"] for row in rows] == [p["generated_tokens"] for p in passes]
    last, lane_s = rows[-1], passes[-1]["busy_s"]["h2d"]
    length_s = passes[-1]["end_s"] - passes[-1]["start_s"]
    assert last["pass/throughput_tok_s"] == pytest.approx(passes[-1]["generated_tokens"] / length_s)
    assert last["pass/utilization/h2d"] == pytest.approx(lane_s / length_s)
    assert last["pass/throughput_so_far_tok_s"] == pytest.approx(summary["throughput_tok_s"])
    assert last["pass/prediction_accuracy_so_far"] == pytest.approx(summary["prediction_accuracy"])
    assert rows[0]["pass/throughput_so_far_tok_s"] == pytest.approx(rows[0]["pass/throughput_tok_s"])


def test_rates_of_a_pass_and_of_all_until_then():
    def record(start_s, end_s, generated):
        return {"start_s": start_s, "end_s": end_s, "generated_tokens": generated, "busy_s": {"gpu": 1.0, "h2d:1": 0.5}}

    rows = PassRows(12.0, timed=True)
    first, second = rows.row(record(100.0, 102.0, 8)), rows.row(record(102.0, 106.0, 52))
    assert (first["throughput_tok_s"], second["throughput_tok_s"]) == (4.0, 13.0)
    assert second["utilization"] == {"gpu": 0.25, "h2d:1": 0.125}
    assert (first["throughput_so_far_tok_s"], second["throughput_so_far_tok_s"]) == (4.0, 10.0)
    assert second["prediction_accuracy_so_far"] == pytest.approx(0.8)
    assert PassRows(None, timed=True).row(record(0.0, 1.0, 1))["prediction_accuracy_so_far"] is None
    assert PassRows(12.0, timed=False).row(record(0.0, 1.0, 1)) == record(0.0, 1.0, 1), "its seconds are none"


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
class Table:
    def __init__(self, *a, **k): pass
class Run:
    id, url, dir, summary = "1", None, "x/files", {}
    def define_metric(self, *a, **k): pass
    def log(self, row): LOG
    def log_artifact(self, a): ARTIFACT
    def finish(self, exit_code): FINISH
def init(mode, **k):
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


def test_an_account_that_is_missing_costs_one_line_and_the_run_is_recorded_offline(tmp_path, monkeypatch):
    """The real client, online, without a key."""
    for name in ("WANDB_API_KEY", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    sink = WandbSink(WandbConfig(mode="online", timeout_s=2 * GIVE_UP_S), tmp_path)
    sink.start({}, {})
    assert "API key" in sink.settle() and "\n" not in sink.warning
    sink.log_pass({"index": 0, "busy_s": {}})
    told = sink.finish({"status": "ok", "generated_tokens": 7})
    (path,) = tmp_path.glob("wandb/*run-*/*.wandb")
    assert told == f"offline ({sink.warning}): wandb sync {path.parent}"
    found = read_offline_file(path)
    assert found.summary == {"status": "ok", "generated_tokens": 7} and found.exit_code == 0
    assert [row["pass/index"] for row in found.history] == [0]


@pytest.mark.parametrize("fault", ["if mode == 'online': time.sleep(600)", "assert mode == 'offline', 'no network'"])
def test_where_nobody_answers_online_the_run_is_recorded_offline(tmp_path, monkeypatch, fault):
    fake_client(tmp_path / "fake", f"INIT={fault}", monkeypatch)
    monkeypatch.setattr(wandb_sink, "_ONLINE_SHARE", 0.5 / GIVE_UP_S)
    (tmp_path / "wandb" / "run-stub").mkdir(parents=True)
    sink = WandbSink(WandbConfig(mode="online", timeout_s=GIVE_UP_S), tmp_path)
    sink.start({}, {})
    assert ("no answer within 0.5 s" if "sleep" in fault else "no ") in sink.settle()
    assert sink.finish({"status": "ok"}).startswith(f"offline ({sink.warning}): wandb sync ")
    assert not (tmp_path / "wandb" / "run-stub").exists()


@pytest.mark.parametrize(
    ("said", "asked", "mode"),
    [(None, None, "offline"), ("", None, "offline"), ("disabled", None, "disabled"), ("online", None, "online"),
     ("dryrun", None, "offline"), ("online", "disabled", "disabled"), ("nonsense", "offline", "offline")],
)  # fmt: skip
def test_the_environment_chooses_the_mode_where_the_configuration_does_not(monkeypatch, said, asked, mode):
    monkeypatch.delenv("WANDB_MODE")
    if said is not None:
        monkeypatch.setenv("WANDB_MODE", said)
    assert parse(WandbConfig, {"mode": asked}).chosen_mode == mode


def test_a_mode_that_does_not_exist_is_told(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "nonsense")
    with pytest.raises(ConfigError, match=r"^wandb.mode: .*WANDB_MODE must be one of offline, .*got 'nonsense'"):
        parse(WandbConfig, {}, "wandb")


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
