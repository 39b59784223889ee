"""benchmarks/gpu.py without a GPU: its stages on the emulated machine, and what it does when time or memory run out."""

from __future__ import annotations

import json
import re
import sys
import tarfile
import time
from importlib.util import find_spec

import pytest
import yaml

from benchmarks import gpu
from benchmarks.gpu_stages import packing, processes, runs
from benchmarks.gpu_stages import peer as peer_stage
from benchmarks.gpu_stages.plan import dry_scale, gpu_scale
from benchmarks.gpu_stages.processes import run_in_processes
from benchmarks.gpu_stages.record import DeviceLost, Record
from benchmarks.gpu_stages.table import markdown
from tests.conftest import ROOT

SOME = ("moelens", "ondemand")


def test_a_dry_run_measures_calibrates_simulates_and_packs(tmp_path, monkeypatch, capsys):
    out, packed = tmp_path / "out", tmp_path / "packed"
    stages = "tokens,ceilings,memory,strategies,calibrate,simulate"
    monkeypatch.setattr(runs, "tiny_models", lambda: ["mixtral-tiny"])  # with all families it would only take longer
    assert (
        gpu.main(
            ["--dry", "--out", str(out), "--pack", str(packed), "--stages", stages, "--strategies", ",".join(SOME)]
        )
        == 0
    )
    content = json.loads((out / "gpu.json").read_text())
    ended = [(name, stage["status"]) for name, stage in content["stages"].items()]
    assert ended == [(name, "ok") for name in stages.split(",")]
    assert content["stages"]["tokens"]["exact"] == content["stages"]["tokens"]["of"] == len(SOME)
    for name in SOME:
        run = content["stages"]["strategies"]["runs"][name]
        assert (run["status"], run["label"], run["generated_tokens"]) == ("ok", "emulated", 6 * 4)
        assert "random weights made in memory" in run["weights_source"]
        assert content["stages"]["simulate"]["runs"][name]["simulated_tok_s"] > 0
        assert content["stages"]["simulate"]["runs"][name]["accuracy"] is not None
    assert (out / "calibration.json").exists()
    page = (out / "gpu.md").read_text()
    assert page.count("| emulated |") == len(SOME)
    names = {path.name for path in packed.iterdir()}
    assert {"gpu.json", "gpu.md", "calibration.json", "runs-1.tar.gz"} <= names
    with tarfile.open(packed / "runs-1.tar.gz") as tar:
        members = tar.getnames()
    for run in (out / "runs").iterdir():
        assert f"runs/{run.name}/summary.json" in members


def test_a_strategy_that_takes_too_long_is_cut_off_and_keeps_its_records(tmp_path):
    scale = dry_scale()
    overrides = [
        *runs.strategy_overrides("ondemand", {}, scale), *scale.workload(), "machine=emulated", "model.path=random",
        "dataset.num_requests=400", "dataset.max_new_tokens=200", f"results_dir={tmp_path}",
    ]  # fmt: skip
    found = runs.run(overrides, box_s=4.0)
    assert (found["status"], found["error"]) == ("interrupted", "cut off after 4 s")
    assert found["num_passes"] > 0
    assert found["throughput_tok_s"] > 0


def test_what_a_user_got_wrong_is_one_line(tmp_path):
    found = runs.run(["strategy=ondemand", "model.path=random", f"results_dir={tmp_path}"], box_s=9.0)
    assert found["status"] == "failed"
    assert found["error"].startswith("verify: must be off for model.path=random")


def test_stages_fail_alone_and_do_not_begin_without_time(tmp_path, capsys):
    seen = []
    record = Record(tmp_path, {"title": "t", "facts": {}}, budget_s=5.0, after=seen.append)

    def broken(left_s: float) -> dict:
        record.keep("broken", {"runs": {"one": {"status": "ok"}}})
        raise OSError("no space")

    assert record.run("broken", broken, needs_s=1.0) is None
    assert seen[-2]["stages"]["broken"] is not None
    assert record.run("long", lambda left_s: {}, needs_s=60.0) is None
    assert record.run("fine", lambda left_s: {"left": left_s <= 5.0}, needs_s=0.0) == {"left": True}
    stages = json.loads((tmp_path / "gpu.json").read_text())["stages"]
    assert [stage["status"] for stage in stages.values()] == ["failed", "skipped", "ok"]
    assert stages["broken"]["reason"] == "OSError: no space"
    assert stages["broken"]["runs"] == {"one": {"status": "ok"}}, "what it had found stays"
    assert "it needs 60 s" in markdown({**record.content})


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
        ["build", "tokens", "ceilings"], ["tokens", "ceilings"],
        ["memory", "strategies", "calibrate", "simulate"], ["memory", "strategies", "calibrate", "simulate"],
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
    done = {"moelens mixtral-tiny": {"status": "failed"}}
    assert runs.check_tokens(scale, tmp_path, 60.0, kept.append, done)["exact"] == 1
    assert asked == ["strategy=ondemand"] * 2


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
        record.keep("endless", {"runs": {"one": {"status": "ok"}}})
        time.sleep(30)
        return {}

    begun_s = time.monotonic()
    assert record.run("endless", endless, needs_s=0.0) is None
    assert time.monotonic() - begun_s < 20
    stage = json.loads((tmp_path / "gpu.json").read_text())["stages"]["endless"]
    assert (stage["status"], stage["runs"]) == ("cut off", {"one": {"status": "ok"}})

    def interrupted(left_s: float) -> dict:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):  # a user's ends everything
        Record(tmp_path, {"title": "t", "facts": {}}, budget_s=60.0, after=lambda content: None).run(
            "user's", interrupted, needs_s=0.0
        )


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
    assert gpu.main(["--out", str(tmp_path)]) == 2
    assert "torch finds no GPU" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        gpu.main(["--stages", "tokens,ceiling"])
    with pytest.raises(SystemExit):
        gpu.main(["--strategies", "moelense"])


TINY_MIXTRAL = {
    "num_hidden_layers": 4, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
    "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 48, "vocab_size": 300,
    "max_position_embeddings": 128,
}  # fmt: skip
ASKED = {"dry": True, "max_new_tokens": 4, "box_s": 60.0, "prompts": [[5, 6, 7], [8], [9, 3], [4, 4, 4, 4]]}


def test_the_outside_peer_generates_and_stops_in_time(tmp_path):
    """transformers on this CPU in the place of a GPU: everything but the offload itself."""
    import torch

    from benchmarks.gpu_stages import accelerate_peer as peer

    model = peer.random_model(TINY_MIXTRAL)
    assert all(torch.isfinite(p).all() for p in model.parameters())
    batch = peer.left_padded([[5, 6, 7], [8]], "cpu")
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [0, 0, 1]]
    for box_s, steps in ((60.0, 4), (0.0, 1)):
        path = tmp_path / "answer.json"
        watch = peer.Watch({"system": "test"}, path, box_s)
        begun_s = time.perf_counter()
        model.generate(**batch, max_new_tokens=4, min_new_tokens=4, do_sample=False, pad_token_id=0,
                       stopping_criteria=[watch])  # fmt: skip
        answer = json.loads(path.read_text())
        assert (answer["steps"], answer["generated_tokens"]) == (steps, 2 * steps)
        assert answer["generation_s"] <= time.perf_counter() - begun_s


@pytest.mark.parametrize("holds", [1, 2, 3, 4])
def test_the_outside_peer_takes_as_many_sequences_as_fit(tmp_path, capsys, holds):
    import torch

    from benchmarks.gpu_stages import accelerate_peer as peer

    model, path, tried = peer.random_model(TINY_MIXTRAL), tmp_path / "answer.json", []
    original = model.generate

    def generate(input_ids, **options):
        tried.append(len(input_ids))
        if len(input_ids) > holds:
            raise torch.OutOfMemoryError("device memory")
        return original(input_ids=input_ids, **options)

    model.generate = generate
    peer.generate(model, ASKED, {"system": "test"}, path)
    answer = json.loads(path.read_text())
    assert tried == {4: [4], 3: [4, 2], 2: [4, 2], 1: [4, 2, 1]}[holds]
    assert (answer["batch"], answer["generated_tokens"], answer["steps"]) == (tried[-1], 4 * tried[-1], 4)
    model.generate = lambda **options: (_ for _ in ()).throw(torch.OutOfMemoryError("device memory"))
    with pytest.raises(MemoryError, match="not even one sequence"):
        peer.generate(model, ASKED, {}, path)


def test_the_outside_peer_needs_host_memory_that_is_free(tmp_path, monkeypatch):
    monkeypatch.setattr(peer_stage, "free_host_gb", lambda: 40.0)
    found = peer_stage.measure(gpu_scale(host_gb=137.4), tmp_path, 60.0, batch=2)
    assert found["peer"] is None
    needs = "accelerate is not installed" if find_spec("accelerate") is None else "needs 97 GB .* of which 40 are free"
    assert re.search(needs, found["reason"])


def test_accelerate_offloads_this_model_and_says_the_same():
    """Its hooks bring each module's weights for each call; here from the host's memory to the host's."""
    accelerate = pytest.importorskip("accelerate")
    import torch

    from benchmarks.gpu_stages import accelerate_peer as peer

    model, batch = peer.random_model(TINY_MIXTRAL), peer.left_padded(ASKED["prompts"], "cpu")
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(**batch, **options)
    layer_bytes = sum(p.nbytes for p in model.model.layers[0].parameters())
    devices = peer.placed(model, model.model.embed_tokens.weight.nbytes + 2.5 * layer_bytes)  # one layer is on its way
    assert [devices[f"model.layers.{layer}"] for layer in range(4)] == [0, "cpu", "cpu", "cpu"]
    moved = accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    assert all(parameter.is_meta for parameter in moved.parameters())
    assert torch.equal(moved.generate(**batch, **options), expected)


def test_processes_are_asked_for_the_same_sizes():
    given = ["--out", "there", "--stages", "tokens,strategies", "--budget-s", "500", "--kv-gb", "7"]
    args = gpu.arguments(gpu.child_command(given, 131.25, ["strategies"], 99.0)[2:])
    assert (args.stages, args.budget_s, args.host_gb, args.kv_gb, args.go_on) == ("strategies", 99.0, 131.25, 7.0, True)
    assert str(args.out) == "there"
