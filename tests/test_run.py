"""Whole runs in this process: what a user gets, and what is left when a run goes wrong in the middle."""

from __future__ import annotations

import gc
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from harness.config import ConfigError
from harness.engine.ops import host
from harness.engine.ops.experts import Experts
from harness.machine.device import pinned
from harness.machine.emulated import EmulatedMachine
from harness.machine.threads.arenas import Arenas
from harness.model.zoo import ensure
from harness.record import compare
from harness.record.files import RecordError
from harness.record.store import read_run
from harness.run import report
from harness.run.experiment import RunFailed, run_experiment
from harness.settings import parse_settings
from harness.verify import oracle, reference
from tests.composing import composed
from tests.conftest import ROOT
from tests.kernels.eventually import eventually


def settings(tmp_path: Path, *overrides: str) -> dict[str, Any]:
    base = ["experiment=smoke", f"results_dir={tmp_path}", "wandb.mode=disabled", "progress=false"]
    return composed(*base, *overrides)


def only_run(tmp_path: Path):
    (folder,) = (tmp_path / "runs").iterdir()
    return read_run(folder)


def test_real_prompts_under_preemption_give_every_token_of_hugging_face(tmp_path, mt_bench):
    """Real MT-Bench prompts, float32, a KV cache small enough to preempt: all tokens equal, nobody lost."""
    summary, folder = run_experiment(
        settings(
            tmp_path,
            f"dataset.path={mt_bench}",
            "dataset.num_requests=24",
            "dataset.max_new_tokens=24",
            "kv_cache_gb=0.0008",
            "strategy.n_real=600",
            "verify=all",
        )
    )
    assert summary["status"] == "ok"
    assert summary["preemptions"] > 0
    assert summary["num_finished"] == 24
    assert summary["verify"]["checked"] == 24
    assert summary["verify"]["mismatched"] == 0
    assert summary["data_source"].startswith("real:")
    assert summary["generated_tokens"] == 24 * 24
    assert len(read_run(folder).requests) == 24


def test_summary_names_label_and_every_promised_field(tmp_path):
    summary, folder = run_experiment(settings(tmp_path))
    promised = """status label strategy model dataset machine hardware num_requests num_finished prompt_tokens
        generated_tokens wall_s throughput_tok_s utilization h2d_gb_s predicted_throughput_tok_s prediction_accuracy
        preemptions peak_bytes verify""".split()
    assert not [name for name in promised if name not in summary]
    assert summary["label"] == "emulated"
    assert "synthetic" in summary["data_source"]
    assert set(summary["utilization"]) >= {"gpu", "cpu", "h2d", "d2h"}
    assert set(summary["peak_bytes"]) >= {"device", "pinned", "host"}
    for name in ("config.yaml", "meta.json", "summary.json", "passes.jsonl", "trace.json", "requests.jsonl"):
        assert (folder / name).is_file(), name
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    assert any(event.get("ph") == "X" and "experts" in event["name"] for event in events)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(ensure(parse_settings(settings(tmp_path)).model))
    rows = read_run(folder).requests
    assert summary["prompt_tokens"] == sum(len(row["prompt_ids"]) for row in rows)
    assert 0 < summary["setup_s"] < summary["setup_s"] + summary["generation_s"] < summary["wall_s"]
    for row in rows:
        assert row["generated_text"] == tokenizer.decode(row["generated_ids"], skip_special_tokens=True)
        assert row["prompt_text"] == tokenizer.decode(row["prompt_ids"], skip_special_tokens=True)
        assert 0 < row["first_token_s"] < row["finished_s"] <= summary["generation_s"]


def test_variants_of_one_package_are_two_rows_by_their_names(tmp_path, capsys):
    for name in ("moegen_g", "moegen_h"):
        given = ("hardware=a5000", "kv_cache_gb=0.01", "verify=off", f"strategy={name}", "strategy.search=false")
        run_experiment(settings(tmp_path, "machine=simulated", *given))
    assert compare.main([str(tmp_path), "--baseline", "strategy=moegen_h", "--format", "json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(row["strategy"], row["ratio_to_row"]) for row in rows] == [("moegen_g", 2), ("moegen_h", 2)]


def test_meta_says_where_data_and_weights_come_from(tmp_path):
    _, folder = run_experiment(settings(tmp_path, "dataset.num_requests=2"))
    meta = read_run(folder).meta
    assert meta["data_source"].startswith("synthetic:")
    assert meta["weights_source"].startswith("random weights")
    assert meta["code_version"] and meta["environment"]["packages"]["torch"]


def test_a_run_that_rejects_everything_is_no_result(tmp_path):
    with pytest.raises(RunFailed, match="every request was rejected; the first: needs .* KV blocks"):
        run_experiment(settings(tmp_path, "kv_cache_gb=0.00002"))
    left = only_run(tmp_path)
    assert left.status == "failed"
    assert sum(left.summary["reject_reasons"].values()) == 8
    assert len(left.requests) == 8


@pytest.mark.parametrize(
    ("override", "field"),
    [
        ("hardware.pinned_memory_gb=0.001", "hardware.pinned_memory_gb"),
        ("kv_cache_gb=100", "hardware.pinned_memory_gb"),
        ("hardware.device_memory_gb=0.0001", "hardware.device_memory_gb"),
        ("hardware=a40", "hardware"),
    ],
)
def test_memory_that_cannot_suffice_names_the_field(tmp_path, override, field):
    with pytest.raises(ConfigError) as error:
        run_experiment(settings(tmp_path, override))
    assert error.value.field == field


def test_an_error_in_a_lane_ends_the_run_with_the_ops_name(tmp_path, monkeypatch):
    run = Experts.run

    def fail(self, ctx, packet):
        if self.layer == 2 and self.batch.decode:
            raise RuntimeError("planted")
        run(self, ctx, packet)

    monkeypatch.setattr(Experts, "run", fail)
    with pytest.raises(RunFailed, match="experts layer 2.*planted"):
        run_experiment(settings(tmp_path))
    left = only_run(tmp_path)
    assert left.status == "failed"
    assert "planted" in left.error
    assert left.summary["status"] == "failed"
    assert left.passes, "the passes before the fault stay readable"
    assert len(left.requests) == 8, "and so do all requests, finished or not"


def test_full_memory_in_the_middle_is_recorded_as_oom(tmp_path, monkeypatch):
    def fail(self, ctx, packet):
        raise MemoryError("planted")

    monkeypatch.setattr(host.DecodeAttention, "run", fail)
    with pytest.raises(RunFailed, match="MemoryError"):
        run_experiment(settings(tmp_path))
    assert only_run(tmp_path).status == "oom"


def test_wrong_tokens_fail_the_run(tmp_path, monkeypatch):
    """A stale expert: layer 1's expert 0 gives what layer 1's expert 1 would."""
    run = Experts.run

    def stale(self, ctx, packet):
        if self.layer == 1 and len(self.parts) > 1:
            self.parts = (self.parts[1], *self.parts[1:])
        run(self, ctx, packet)

    monkeypatch.setattr(Experts, "run", stale)
    with pytest.raises(RunFailed, match="verification failed"):
        run_experiment(settings(tmp_path))
    left = only_run(tmp_path)
    assert left.status == "failed"
    assert left.summary["verify"]["mismatched"] > 0


def test_what_was_measured_is_on_disk_and_memory_given_back_before_tokens_are_verified(tmp_path, monkeypatch):
    """The reference takes much memory. Whoever dies of that leaves its numbers in a summary that counts as failed."""
    seen: list[dict[str, Any]] = []
    closed: list[str] = []
    close = EmulatedMachine.close
    monkeypatch.setattr(EmulatedMachine, "close", lambda self: closed.append(self.name) or close(self))

    def verify(checkpoint, sequences, *, eos):
        (folder,) = (tmp_path / "runs").iterdir()
        seen.append(json.loads((folder / "summary.json").read_text()))
        assert closed == ["emulated"]
        raise MemoryError("planted")

    monkeypatch.setattr(oracle, "verify", verify)
    with pytest.raises(RunFailed, match="MemoryError: planted"):
        run_experiment(settings(tmp_path))
    assert (seen[0]["status"], seen[0]["error"]) == ("failed", "ended while its tokens were verified")
    left = only_run(tmp_path)
    assert left.status == "oom" and left.summary["error"] == "MemoryError: planted"
    assert left.summary["throughput_tok_s"] == seen[0]["throughput_tok_s"] > 0


def test_a_reference_that_memory_cannot_hold_is_refused_before_anything_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(pinned, "free_bytes_by_limit", lambda: {"MemAvailable": 1_000})
    monkeypatch.setattr(reference, "_loaded", {})
    told = r"^verify: must be off: a float32 reference of this model takes 0\.\d+ GB of host memory, of which 1e-06 are"
    with pytest.raises(ConfigError, match=told):
        run_experiment(settings(tmp_path))
    with pytest.raises(RunFailed, match="kept"):  # one that is loaded takes no more
        monkeypatch.setattr(reference, "is_loaded", lambda checkpoint: True)
        monkeypatch.setattr(oracle, "verify", lambda *given, **options: (_ for _ in ()).throw(MemoryError("kept")))
        run_experiment(settings(tmp_path / "again"))


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM])
def test_a_kill_leaves_readable_files_and_sigterm_a_summary(tmp_path, sent):
    command = [sys.executable, "run.py", "experiment=smoke", f"results_dir={tmp_path}", "wandb.mode=disabled"]
    command += ["dataset.num_requests=2000", "dataset.max_new_tokens=256", "kv_cache_gb=0.02", "verify=off"]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    try:
        eventually(lambda: any(p.read_text().count("\n") >= 3 for p in tmp_path.glob("runs/*/passes.jsonl")))
        assert process.poll() is None, "it has ended by itself"
        os.kill(process.pid, sent)
        _, told = process.communicate()
    finally:
        process.kill()
    left = only_run(tmp_path)
    assert left.status == "interrupted"
    assert len(left.passes) >= 3
    assert {row["label"] for row in left.passes} == {"emulated"}
    assert left.config["dataset"]["num_requests"] == 2000
    assert process.returncode == (143 if sent == signal.SIGTERM else -signal.SIGKILL)
    if sent == signal.SIGTERM:
        assert told.splitlines()[-1] == f"terminated; what was recorded: {left.folder}"
        assert left.status_record["status"] == left.summary["status"] == "interrupted"
        assert left.error == "terminated" and left.summary["num_finished"] < len(left.requests) == 2000
        assert (left.folder / "trace.json").exists()


def test_a_disk_with_room_for_the_summary_but_not_for_the_trace_keeps_the_summary(tmp_path, monkeypatch):
    def full(path, *args, **kwargs):
        raise RecordError(f"{path}: cannot be written: No space left on device")

    monkeypatch.setattr(report, "write_trace", full)
    with pytest.raises(RecordError, match="trace.json: cannot be written"):
        run_experiment(settings(tmp_path, "dataset.num_requests=2"))
    left = only_run(tmp_path)
    assert left.status == left.summary["status"] == "failed"
    assert "No space left" in left.error and "No space left" in left.summary["error"]
    assert left.summary["generated_tokens"] == 16


def test_a_corrupt_weight_is_bad_input_and_named(tmp_path):
    """Found by the op that reads it, long after the settings were checked."""
    folder = tmp_path / "checkpoint"
    shutil.copytree(ensure(parse_settings(settings(tmp_path)).model), folder)
    weights = folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    header_bytes = int.from_bytes(content[:8], "little")
    content[8 + header_bytes : 8 + header_bytes + 4] = b"\xff" * 4
    weights.write_bytes(content)
    with pytest.raises(ConfigError, match="model.path: .*corrupt: holds NaN or infinity"):
        run_experiment(settings(tmp_path, "model=checkpoint", f"model.path={folder}"))
    assert only_run(tmp_path).status == "failed"


def test_a_broken_checkpoint_in_the_cache_says_how_to_get_a_whole_one(tmp_path, monkeypatch):
    monkeypatch.setenv("MOE_HARNESS_CACHE", str(tmp_path / "cache"))
    folder = ensure(parse_settings(settings(tmp_path)).model)
    (folder / "config.json").unlink()
    with pytest.raises(ConfigError, match=f"config.json: missing; remove {folder}, and it is made again"):
        run_experiment(settings(tmp_path))


def test_the_shuffled_machine_reports_no_times(tmp_path):
    summary, _ = run_experiment(settings(tmp_path, "machine=shuffled", "strategy=ondemand", "dataset.num_requests=2"))
    assert summary["status"] == "ok" and summary["verify"]["checked"] == 2
    assert summary["throughput_tok_s"] is None and summary["generation_s"] is None
    assert {row["first_token_s"] for row in only_run(tmp_path).requests} == {None}


def test_a_run_gives_its_memory_back_though_cycles_hold_its_machine(tmp_path, monkeypatch):
    """Jobs of a sweep follow in one process; without the collector, whatever a job leaves in cycles stays for good."""
    allocate, arenas = Arenas._allocate, []

    def recorded(self, buffer):
        memory = allocate(self, buffer)
        arenas.append(weakref.ref(memory))
        return memory

    monkeypatch.setattr(Arenas, "_allocate", recorded)
    gc.collect()
    gc.disable()
    try:
        resident_bytes = []
        for strategy in ("ondemand", "moelens", "moelightning"):  # poison writes to every page of 100 MB of cache
            big = [f"strategy={strategy}", "machine.poison=true", "kv_cache_gb=0.1", "verify=off"]
            run_experiment(settings(tmp_path, "dataset.num_requests=1", "dataset.max_new_tokens=2", *big))
            assert len(arenas) > 5 and not [memory for memory in arenas if memory() is not None]
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            resident_bytes.append(pages * resource.getpagesize())
    finally:
        gc.enable()
    assert max(resident_bytes) < min(resident_bytes) + 0.8e8, "less than a second job's cache"
