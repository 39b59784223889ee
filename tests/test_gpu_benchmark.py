"""benchmarks/gpu.py without a GPU: its stages on the emulated machine, and what it does when time or memory run out."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tarfile
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import yaml

from benchmarks import gpu
from benchmarks.gpu_stages import packing, processes, runs
from benchmarks.gpu_stages import record as record_module
from benchmarks.gpu_stages.plan import dry_scale, gpu_scale
from benchmarks.gpu_stages.processes import run_in_processes
from benchmarks.gpu_stages.record import DeviceLost, Record
from benchmarks.gpu_stages.table import markdown
from harness.calibration import together, undisturbed
from tests.conftest import ROOT
from tests.kernels.eventually import eventually

SOME = ("moelens", "ondemand")


def test_a_machine_without_the_packages_is_told_which():
    """Nothing of the harness is imported before: it would end in a traceback."""
    bare = [sys.executable, "-S", "-E", str(ROOT / "benchmarks" / "gpu.py"), "--dry"]
    told = subprocess.run(bare, capture_output=True, text=True, timeout=60, check=False)
    assert told.returncode == 2 and "these packages are missing: torch, " in told.stderr
    assert len(told.stderr.splitlines()) == 1


def test_the_simulation_has_the_links_of_the_calibration():
    """Its costs are those beyond bytes over these rates: with the faster ones of the stage `ceilings`, too little."""
    found = gpu.with_links(["hardware.h2d_gb_s=55.5", "hardware.host_gb_s=71"], {"h2d_gb_s": 54.4, "d2h_gb_s": 54.8})
    assert found == ["hardware.h2d_gb_s=54.4", "hardware.host_gb_s=71", "hardware.d2h_gb_s=54.8"]
    assert gpu.with_links(["hardware.h2d_gb_s=55.5"], {}) == ["hardware.h2d_gb_s=55.5"]


@pytest.mark.slow
def test_a_dry_run_measures_calibrates_simulates_and_packs(tmp_path, monkeypatch, capsys):
    out, packed = tmp_path / "out", tmp_path / "packed"
    stages = "kernels,ceilings,tokens,memory,stream,loop,steady,strategies,calibrate,simulate"
    monkeypatch.setattr(runs, "tiny_models", lambda: ["mixtral-tiny"])  # with all families it would only take longer
    monkeypatch.setattr(undisturbed, "MAX_ATTEMPTS", 1)  # on a busy machine it would measure for minutes
    monkeypatch.setattr(together, "_STREAM_S", 0.05)
    chosen = ["--strategies", ",".join(SOME), "--whole", SOME[0], "--decode-passes", "2"]
    assert gpu.main(["--dry", "--out", str(out), "--pack", str(packed), "--stages", stages, *chosen]) == 0
    content = json.loads((out / "gpu.json").read_text())
    ended = [(name, stage["status"]) for name, stage in content["stages"].items()]
    assert ended == [(name, "ok") for name in stages.split(",")[1:]], "there is no GPU whose kernels to check"
    assert content["stages"]["tokens"]["exact"] == content["stages"]["tokens"]["of"] == 2 * len(SOME)
    assert [name for name in content["stages"]["tokens"]["runs"] if name.endswith(" bfloat16")] == [
        f"{name} mixtral-tiny bfloat16" for name in SOME
    ]
    [(name, run)] = content["stages"]["strategies"]["runs"].items()
    assert (name, run["status"], run["label"], run["generated_tokens"]) == (SOME[0], "ok", "emulated", 6 * 4)
    assert "random weights made in memory" in run["weights_source"]
    assert content["stages"]["simulate"]["runs"][name]["simulated_tok_s"] > 0
    assert content["stages"]["simulate"]["runs"][name]["accuracy"] is not None
    for name in SOME:
        steady = content["stages"]["steady"]["runs"][name]
        assert steady["steady_decode"]["passes"] == 2 and "after 2 passes in a row" in steady["stopped"]
        assert content["stages"]["simulate"]["runs"][name]["steady_accuracy"] is not None
    packets = content["stages"]["stream"]["packets"]
    assert list(packets) == ["packets of 0.01 MB", "packets of 0.05 MB"]
    assert all(row["gb_s"] > 0 and row["of_ceiling"] == row["gb_s"] / 0.5 for row in packets.values())
    assert (out / "calibration.json").exists()
    assert content["stages"]["calibrate"]["links"] == {"h2d_gb_s": 0.5, "d2h_gb_s": 0.5}
    loop = content["stages"]["loop"]
    assert loop["tokens"] == {"exact": 6, "of": 6}
    assert (loop["decode"]["sequences"], loop["decode"]["passes"]) == (6, 2) and loop["decode"]["tok_s"] > 0
    page = (out / "gpu.md").read_text()
    assert "Loop by hand (torch; 6 of 6 sequences" in page and "| moelens | " in page
    assert page.count("| emulated |") == len(SOME) + 1 and "| packets of 0.05 MB |" in page
    names = {path.name for path in packed.iterdir()}
    assert {"gpu.json", "gpu.md", "calibration.json", "runs-1.tar.gz"} <= names
    with tarfile.open(packed / "runs-1.tar.gz") as tar:
        members = tar.getnames()
    for run in (out / "runs").iterdir():
        assert f"runs/{run.name}/summary.json" in members


def test_a_strategy_that_takes_too_long_is_cut_off_and_keeps_its_records(tmp_path, monkeypatch):
    """Its time is over once it has finished some passes, however long that takes here."""
    main = threading.main_thread().ident

    def some_passes() -> bool:
        return any(path.read_text().count("\n") >= 3 for path in tmp_path.glob("runs/*/passes.jsonl"))

    def end_the_box() -> None:
        eventually(some_passes)
        signal.pthread_kill(main, signal.SIGINT)

    @contextmanager
    def boxed(seconds, over):
        with record_module.boxed(1e6, over):
            over.set()
            threading.Thread(target=end_the_box, daemon=True).start()
            yield

    monkeypatch.setattr(runs, "boxed", boxed)
    scale = dry_scale()
    overrides = [
        *runs.strategy_overrides("ondemand", {}, scale), *scale.workload(), "machine=emulated", "model.path=random",
        "dataset.num_requests=4000", "dataset.max_new_tokens=200", f"results_dir={tmp_path}",
    ]  # fmt: skip
    found = runs.run(overrides, box_s=4.0)
    assert (found["status"], found["error"]) == ("interrupted", "cut off after 4 s")
    assert found["num_passes"] > 0
    assert found["throughput_tok_s"] > 0


def test_what_a_user_got_wrong_is_one_line(tmp_path):
    found = runs.run(["strategy=ondemand", "model.path=random", f"results_dir={tmp_path}"], box_s=900.0)
    assert found["status"] == "failed"
    assert found["error"].startswith("verify: must be off for model.path=random")


def test_stages_fail_alone_and_do_not_begin_without_time(tmp_path, capsys):
    seen = []
    record = Record(tmp_path, {"title": "t", "facts": {}}, budget_s=500.0, after=seen.append)

    def broken(left_s: float) -> dict:
        record.keep("broken", {"runs": {"one": {"status": "ok"}}})
        raise OSError("no space")

    assert record.run("broken", broken, needs_s=1.0) is None
    assert seen[-2]["stages"]["broken"] is not None
    assert record.run("long", lambda left_s: {}, needs_s=600.0) is None
    assert record.run("fine", lambda left_s: {"left": left_s <= 500.0}, needs_s=0.0) == {"left": True}
    stages = json.loads((tmp_path / "gpu.json").read_text())["stages"]
    assert [stage["status"] for stage in stages.values()] == ["failed", "skipped", "ok"]
    assert stages["broken"]["reason"] == "OSError: no space"
    assert stages["broken"]["runs"] == {"one": {"status": "ok"}}, "what it had found stays"
    assert "it needs 600 s" in markdown({**record.content})


STAGES_THAT_BREAK_OFF = """
import os, signal, sys
from pathlib import Path
from benchmarks.gpu_stages.processes import DEVICE_LOST
from benchmarks.gpu_stages.processes import run_in_processes
from benchmarks.gpu_stages.record import DeviceLost, Record

record = Record(Path(sys.argv[1]), None, budget_s=float(sys.argv[3]), after=lambda content: None)
ends = {
    ("tokens", "b"): lambda: os.kill(os.getpid(), signal.SIGSEGV),
    ("strategies", "a"): lambda: os._exit(DEVICE_LOST),
}

def runs(name):
    done = dict(record.found(name).get("runs", {}))
    for row in (row for row in "abc" if row not in done):
        record.keep(name, {"runs": {**done, row: "under way"}})
        ends.get((name, row), int)()
        done[row] = f"ok in {os.getpid()}"
    return {"runs": done}

def stage(name):
    if name == "ceilings":
        os.kill(os.getpid(), signal.SIGKILL)
    return runs(name) if name in ("tokens", "strategies") else {"process": os.getpid()}

for name in sys.argv[2].split(","):
    record.run(name, lambda left_s: stage(name), needs_s=0.0)
"""


def test_a_process_that_breaks_off_takes_no_other_stage_along(tmp_path):
    record = Record(tmp_path, {"title": "t", "facts": {}}, budget_s=100.0, after=lambda content: None)
    started = []

    def command(stages, left_s):
        started.append(list(stages))
        return [sys.executable, "-c", STAGES_THAT_BREAK_OFF, str(tmp_path), ",".join(stages), str(left_s)]

    run_in_processes(gpu.STAGES, record, command)
    assert started == [
        ["build", "tests", "kernels", "ceilings", "tokens"], ["tokens"], ["tokens"],
        ["memory", "stream", "loop", "steady", "strategies", "calibrate", "simulate"],
        ["memory", "strategies", "calibrate", "simulate"],
        ["peer"],
    ]  # fmt: skip
    stages = record.content["stages"]
    assert [name for name, stage in stages.items() if stage["status"] != "ok"] == ["ceilings"]
    assert stages["ceilings"]["reason"] == "the process ended by SIGKILL"
    for name, broken in (("tokens", "b"), ("strategies", "a")):
        rows = stages[name]["runs"]
        assert set(rows) == {"a", "b", "c"} and [row for row in rows if rows[row] == "under way"] == [broken]
    pinned_by = stages["memory"]["process"]
    assert stages["strategies"]["runs"]["b"] == f"ok in {pinned_by}", "memory is pinned anew by who uses it"


def test_a_process_that_hangs_ends_with_its_time(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "_GRACE_S", 0.2)
    monkeypatch.setattr(processes, "_LEAST_S", 0.0)
    record = Record(tmp_path, {"title": "t", "facts": {}}, budget_s=0.5, after=lambda content: None)
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    run_in_processes(["build", "peer"], record, lambda stages, left_s: sleep)
    assert record.content["stages"]["build"] == {
        "status": "failed", "reason": "the process did not end within its time", "seconds": 0.0,
    }  # fmt: skip
    assert "peer" not in record.content["stages"], "there is no time left for it"


def test_what_a_process_leaves_behind_ends_with_it(tmp_path):
    """Such as accelerate's, which would hold the GPU and 90 GB."""
    record = Record(tmp_path, {"title": "t", "facts": {}}, budget_s=100.0, after=lambda content: None)
    path = tmp_path / "pid"
    text = "import pathlib, subprocess, sys; number = subprocess.Popen(['sleep', '300']).pid; "
    text += f"pathlib.Path({str(path)!r}).write_text(str(number))"
    run_in_processes(["peer"], record, lambda stages, left_s: [sys.executable, "-c", text])
    status = Path(f"/proc/{path.read_text()}/stat")
    eventually(lambda: not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z")


def test_time_is_kept_for_what_follows_the_strategies(tmp_path):
    record, given = Record(tmp_path, {"title": "t", "facts": {}}, budget_s=500.0, after=lambda content: None), {}

    def command(stages, left_s):
        given[stages[0]] = left_s
        return [sys.executable, "-c", ""]

    run_in_processes(["tokens", "strategies", "peer"], record, command)
    assert given["tokens"] > 490 and 380 < given["strategies"] < 392 and given["peer"] > 480


def test_runs_that_were_done_before_are_not_done_again(tmp_path, monkeypatch):
    asked, kept, scale = [], [], dry_scale("moelens,ondemand")
    monkeypatch.setattr(runs, "tiny_models", lambda: ["mixtral-tiny"])
    monkeypatch.setattr(runs, "run", lambda overrides, box_s: asked.append(overrides[0]) or {"status": "ok"})
    done = {"moelens": {"status": "failed"}}
    found = runs.measure_strategies(scale, tmp_path, [], 60.0, kept.append, done)
    assert found == kept[-1] == {"runs": {"moelens": {"status": "failed"}, "ondemand": {"status": "ok"}}}
    assert "while this was under way" in kept[0]["runs"]["ondemand"]["error"], "should the process end now"
    done = {"moelens mixtral-tiny": {"status": "failed"}, "ondemand mixtral-tiny bfloat16": {"status": "ok"}}
    assert runs.check_tokens(scale, tmp_path, 60.0, kept.append, done)["exact"] == 3
    assert asked == ["strategy=ondemand", "strategy=moelens", "strategy=ondemand"]


def test_a_device_that_has_failed_ends_the_process(tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "run", lambda overrides, box_s: {"status": "failed"})
    monkeypatch.setattr(runs, "device_lost", lambda: "an illegal memory access was encountered")
    record = Record(tmp_path, {"title": "t", "facts": {}}, budget_s=60.0, after=lambda content: None)
    with pytest.raises(DeviceLost, match="illegal memory access"):
        record.run("strategies", lambda left_s: runs.measure_strategies(
            dry_scale("moelens,ondemand"), tmp_path, [], left_s, lambda found: record.keep("strategies", found)
        ), needs_s=0.0)  # fmt: skip
    stage = json.loads((tmp_path / "gpu.json").read_text())["stages"]["strategies"]
    assert stage == {"status": "under way", "runs": {"moelens": {"status": "failed"}}}


def test_a_stage_ends_with_the_budget_and_keeps_what_it_has_found(tmp_path, capsys):
    record = Record(tmp_path, {"title": "t", "facts": {}}, budget_s=0.3, after=lambda content: None)

    def endless(left_s: float) -> dict:
        eventually(lambda: False)
        return {}

    record.keep("endless", {"runs": {"one": {"status": "ok"}}})
    assert record.run("endless", endless, needs_s=-1e6) is None
    stage = json.loads((tmp_path / "gpu.json").read_text())["stages"]["endless"]
    assert (stage["status"], stage["runs"]) == ("cut off", {"one": {"status": "ok"}})

    def interrupted(left_s: float) -> dict:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):  # a user's ends everything
        Record(tmp_path, {"title": "t", "facts": {}}, budget_s=60.0, after=lambda content: None).run(
            "user's", interrupted, needs_s=0.0
        )


def test_a_budget_that_is_spent_already_cuts_off_and_nothing_else(tmp_path, capsys):
    """The interrupt may come before the block has begun: it is the budget's then too, and ends no session of tests."""
    record = Record(tmp_path, {"title": "t", "facts": {}}, budget_s=0.0, after=lambda content: None)
    for number in range(20):
        assert record.run(f"late {number}", lambda left_s: {"ok": eventually(lambda: False)}, needs_s=-1e6) is None
        assert record.content["stages"][f"late {number}"]["status"] == "cut off"
    assert runs.run(["strategy=ondemand", f"results_dir={tmp_path}"], box_s=0.0)["error"] == "cut off after 0 s"


@pytest.mark.parametrize("before", [signal.default_int_handler, signal.SIG_IGN])
def test_an_interrupt_at_the_end_of_a_box_arrives_within_it(before, request):
    """The time is over just when the work is done: nothing of it may be left for whoever comes next. A shell's
    background jobs ignore interrupts, and do so again behind the box."""
    ours = signal.signal(signal.SIGINT, before)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, ours))
    for _ in range(30):
        over = threading.Event()
        with suppress(KeyboardInterrupt), record_module.boxed(1e-3, over):
            eventually(over.is_set)
        assert signal.getsignal(signal.SIGINT) is before
    time.sleep(0.01)


def test_runs_for_which_no_time_is_left_are_told(tmp_path):
    scale, kept = dry_scale("moelens,ondemand"), []
    found = runs.check_tokens(scale, tmp_path, -1.0, kept.append)
    assert found["exact"] == 0 and found["of"] == len(found["runs"]) >= 2
    rows = [*found["runs"].values(), *runs.measure_strategies(scale, tmp_path, [], 1.0, kept.append)["runs"].values()]
    assert all(row == {"status": "skipped", "error": "no time left"} for row in rows)
    assert "no time left" in markdown(
        {"title": "t", "facts": {}, "stages": {"strategies": {"status": "ok", **kept[-1]}}}
    )


def test_fewer_layers_where_they_are_asked_for():
    assert gpu_scale(host_gb=256.0).layers == 32
    assert gpu_scale(host_gb=256.0, most_layers=12).layers == 12
    assert gpu_scale(host_gb=40.0, most_layers=12).layers < 12, "as many as fit"


def test_packed_files_are_few_and_small_and_what_is_left_out_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(packing, "MAX_BYTES", 4000)
    folder, out = tmp_path / "in", tmp_path / "out"
    noise = [bytes((i * i * 7919 + n) % 251 for i in range(1500)) for n in range(12)]
    for number, data in enumerate(noise):
        run = folder / "runs" / f"run-{number:02}"
        run.mkdir(parents=True)
        (run / "summary.json").write_bytes(data)
    import random

    (folder / "runs/run-03/trace.json").write_bytes(random.Random(0).randbytes(9000))
    (folder / "gpu.json").write_text("{}")
    left_out = packing.pack(folder, out)
    assert any(line.startswith("run-03: trace.json") for line in left_out)
    files = list(out.iterdir())
    assert len(files) <= packing.MAX_FILES
    found = {}
    for path in files:
        assert path.stat().st_size <= 4200
        if path.name.startswith("runs-"):
            with tarfile.open(path) as tar:
                found |= {m.name: tar.extractfile(m).read() for m in tar.getmembers()}
    gone = [line for line in left_out if line.endswith("all of it")]
    assert len(found) == len(noise) - len(gone)
    for name, data in found.items():
        assert data == noise[int(name.split("-")[1][:2])]


@pytest.mark.parametrize(("host_gb", "layers"), [(137.4, 32), (100.0, 23), (64.0, 14)])
def test_as_many_layers_as_the_host_holds(host_gb, layers):
    scale = gpu_scale(host_gb=host_gb)
    spec = yaml.safe_load((ROOT / "conf/model/mixtral-8x7b.yaml").read_text())["spec"]
    weights_gb = 93.4 * (scale.layers / spec["num_layers"])
    assert scale.layers == layers
    assert weights_gb + scale.kv_gb < host_gb - 8
    assert weights_gb + scale.kv_gb + 3.5 > min(host_gb - 13, 93.4 + scale.kv_gb), "a layer more would have fitted"
    kv_bytes = 2 * 2 * spec["num_kv_heads"] * spec["head_dim"] * scale.layers
    assert 0.7 < scale.num_requests * (98 + 16) * kv_bytes / (scale.kv_gb * 1e9) < 1
    with pytest.raises(SystemExit, match="fewer than two layers"):
        gpu_scale(host_gb=16)


def test_without_a_gpu_it_says_so(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("harness.machine.cuda.device_found", lambda: False)
    assert gpu.main(["--out", str(tmp_path), "--stages", "tokens"]) == 2
    assert "torch finds no GPU" in capsys.readouterr().err
    for option, names in (("--stages", "tokens,ceiling"), ("--strategies", "moelense"), ("--whole", "moelens,")):
        assert gpu.main([option, names]) == 2
        assert capsys.readouterr().err.startswith(f"error: {option}: unknown ")


def test_processes_are_asked_for_the_same_sizes():
    given = ["--out", "there", "--stages", "tokens,strategies", "--budget-s", "500", "--kv-gb", "7"]
    args = gpu.parser().parse_args(gpu.child_command(given, 131.25, ["strategies"], 99.0)[2:])
    assert (args.stages, args.budget_s, args.host_gb, args.kv_gb, args.go_on) == ("strategies", 99.0, 131.25, 7.0, True)
    assert str(args.out) == "there"
