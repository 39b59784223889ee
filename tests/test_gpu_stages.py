"""Single stages of benchmarks/gpu.py without a GPU: tests, host memory, wrong kernels, and what is compared."""

from __future__ import annotations

import pytest

from benchmarks.gpu_stages import accuracy, host_memory, kernels, tests_on_gpu
from benchmarks.gpu_stages.plan import dry_scale, gpu_scale
from benchmarks.gpu_stages.runs import share_of_s
from benchmarks.gpu_stages.table import markdown
from harness.machine.device.pinned import HostMemory
from tests.conftest import ROOT


def test_tests_on_a_gpu_are_kept_and_their_failure_is_told(tmp_path):
    good = tests_on_gpu.run(tmp_path, 250.0, ("tests/test_packaging.py", "--collect-only", "-n", "0"))
    assert "collected" in good["passed"] or "tests" in good["passed"]
    with pytest.raises(RuntimeError, match="exit code 4: .*, see tests.md"):
        tests_on_gpu.run(tmp_path, 250.0, ("tests/no_such_file.py", "-n", "0"))
    assert "no_such_file" in (tmp_path / "tests.md").read_text()
    with pytest.raises(RuntimeError, match="not at their end within 0 s"):
        tests_on_gpu.run(tmp_path, 0.01)


def test_memory_is_touched_as_far_as_the_limits_go():
    free = iter([1 << 40] * 3)
    assert host_memory.touch(3 << 20, HostMemory(read_limits=lambda: {"limit": next(free)}))["stopped"] is None
    short = HostMemory(patience_s=0.0, read_limits=lambda: {"limit": 1 << 29})
    found = host_memory.touch(1 << 29, short)
    assert "the limit is limit" in found["stopped"] and found["free_gb_before"] > 0


def test_a_wrong_kernel_is_left_to_torch_in_later_runs_and_told():
    rows = {"experts over 16 tokens": {"kernel": "experts", "status": "wrong", "error": "differs by 0.5"}}
    assert kernels.overrides(rows) == ["machine.triton=[routing,prefill,decode,copies,rows]"]
    page = markdown(
        {"title": "t", "facts": {}, "stages": {"kernels": {"status": "ok", "runs": rows, "left_out": ["experts"]}}}
    )
    assert "| experts over 16 tokens | - |" in page and "Left to torch in all runs: experts." in page


def test_a_run_that_was_skipped_or_cut_off_is_not_told_as_wrong():
    runs = {"moelens": "ok", "fate": "failed", "fiddler": "skipped", "klotski": "skipped"}
    stage = {"status": "ok", "runs": {name: {"status": status} for name, status in runs.items()}}
    page = markdown({"title": "t", "facts": {}, "stages": {"tokens": stage}})
    assert "Hugging Face: 1 of 4 runs exact; failed: fate; skipped: fiddler, klotski.\n" in page


def test_what_tells_most_is_measured_first():
    names = list(gpu_scale(host_gb=256.0).strategies)
    assert names[:3] == ["moelens", "moelightning", "ondemand"]
    assert set(names) == {path.stem for path in (ROOT / "conf/strategy").glob("[!_]*.yaml")}


def test_a_run_takes_what_later_ones_can_spare():
    """An equal share would cut the first of many runs off, while the last ones need little."""
    assert share_of_s(100.0, 1) == 100.0
    assert share_of_s(100.0, 5) == 60.0, "ten seconds are left for each of the others"
    assert share_of_s(30.0, 5) == 6.0, "too few for ten seconds each: as much as each of them"


def test_steady_passes_and_whole_runs_are_each_compared_with_their_like(tmp_path, monkeypatch):
    """Each is compared with its like; a strategy without steady passes has none to compare."""
    asked = []

    def simulated(overrides):
        asked.append([text for text in overrides if text.startswith(("strategy=", "stop_"))])
        return {"throughput_tok_s": 80.0, "steady_decode": {"tok_s": 50.0}}

    monkeypatch.setattr(accuracy, "_simulated", simulated)
    monkeypatch.setattr(accuracy, "table_path", lambda settings, spec: tmp_path)
    runs_found = {"moelens": {"status": "ok", "throughput_tok_s": 100.0}}
    steady = {name: {"steady_decode": {"tok_s": 40.0}} for name in ("moelens", "ondemand")}
    found = accuracy.simulate(dry_scale("moelens,ondemand"), [], runs_found, steady)["runs"]
    assert found["moelens"] == {
        "steady_tok_s": 50.0, "steady_accuracy": 0.75, "simulated_tok_s": 80.0, "accuracy": pytest.approx(0.8),
    }  # fmt: skip
    assert found["ondemand"] == {"steady_tok_s": 50.0, "steady_accuracy": 0.75}
    stop = "stop_after_decode_passes=1"
    assert asked == [["strategy=moelens", stop], ["strategy=moelens"], ["strategy=ondemand", stop]]
