"""A run of run.py on machine=auto where a GPU is found, the device being one made of threads."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from benchmarks.gpu_stages import runs
from benchmarks.gpu_stages.plan import dry_scale
from harness.config import ConfigError
from harness.machine import auto, cuda
from harness.machine.device import pinned
from harness.record.files import read_json
from harness.run.experiment import RunFailed, run_experiment
from harness.run.session import Session
from kernels import triton as gpu_kernels
from tests.composing import composed
from tests.fake_device import FakeDevice

SMOKE = ("experiment=smoke", "dataset.num_requests=3", "dataset.max_new_tokens=3", "wandb.mode=disabled",
         "progress=false")  # fmt: skip


@pytest.fixture
def devices(monkeypatch):
    """GPUs that runs have found."""
    made: list[FakeDevice] = []

    def make() -> FakeDevice:
        made.append(FakeDevice(len(made)))
        return made[-1]

    monkeypatch.setattr(cuda, "TorchCudaRuntime", make)
    for module in (cuda, auto):
        monkeypatch.setattr(module, "device_found", lambda: True)
    monkeypatch.setattr(cuda, "resource", lambda: "fake device")
    yield made
    for device in made:
        device.close()


def test_a_run_says_measured_and_knows_its_links(devices, tmp_path):
    summary, folder = run_experiment(composed("machine=auto", *SMOKE, f"results_dir={tmp_path}"))
    assert (summary["status"], summary["label"], summary["machine"]) == ("ok", "measured", "cuda")
    assert summary["verify"]["checked"] == 3
    assert "-cuda-" in folder.name
    assert summary["h2d_ceiling_gb_s"] != 0.5, "the link of the emulated machine's profile says nothing here"
    assert 0 < summary["utilization"]["gpu"] <= 1
    assert summary["stolen_core_share"] is None
    assert read_json(folder / "plan.json")["label"] == "measured"
    assert read_json(folder / "meta.json")["machine"]["GPU"] == "fake device"
    assert not devices[0].pinned


def test_the_gpu_is_as_large_as_the_profile_says(devices, tmp_path):
    run_experiment(composed("machine=cuda", *SMOKE, "hardware.device_memory_gb=0.1", f"results_dir={tmp_path}"))
    assert devices[0]._limit_bytes == 100_000_000 + (256 << 20)
    too_much = r"hardware.device_memory_gb: must be at most 0.8053: fake device has 1.074 GB, .* got 2"
    with pytest.raises(ConfigError, match=too_much):
        run_experiment(composed("machine=cuda", *SMOKE, "hardware.device_memory_gb=2", f"results_dir={tmp_path}"))


def test_several_gpus_are_refused_before_any_work(devices, tmp_path):
    with pytest.raises(ConfigError, match="hardware.num_gpus: must be 1 on machine=cuda, got 2"):
        overrides = ("machine=cuda", *SMOKE, "strategy=moelightning", "hardware.num_gpus=2", f"results_dir={tmp_path}")
        run_experiment(composed(*overrides))
    assert not devices


def test_gpu_kernels_are_chosen_by_a_setting(devices, monkeypatch):
    """Each by itself; a machine without the setting has all of them again."""
    on_gpu = SimpleNamespace(is_cuda=True)
    monkeypatch.setattr(gpu_kernels, "available", lambda: True)
    all_of_them = gpu_kernels.KERNELS
    for setting, served in (("[routing,prefill]", ("routing", "prefill")), ("[]", ()), (None, all_of_them)):
        session = Session.of(composed("machine=cuda", *SMOKE, *([f"machine.triton={setting}"] if setting else [])))
        session.load_model()
        session.build_machine().close()
        assert tuple(kernel for kernel in all_of_them if gpu_kernels.serves(on_gpu, kernel)) == served
    with pytest.raises(
        ConfigError, match="machine.triton: must be some of routing, experts, prefill, decode, copies, rows, got moe"
    ):
        Session.of(composed("machine=cuda", *SMOKE, "machine.triton=[moe]"))


def test_a_gpu_without_bfloat16_says_so(devices, monkeypatch, tmp_path):
    monkeypatch.setattr(FakeDevice, "has_bfloat16", False)
    run_experiment(composed("machine=cuda", *SMOKE, f"results_dir={tmp_path}"))  # in float32
    with pytest.raises(ConfigError, match="model.dtype: must be float32 on fake device, which has no bfloat16"):
        run_experiment(composed("machine=cuda", *SMOKE, "model.dtype=bfloat16", f"results_dir={tmp_path}"))


def test_memory_that_cannot_be_pinned_ends_the_run_as_such(devices, monkeypatch, tmp_path):
    original = FakeDevice.pin

    def pin(self, memory):
        self.unpinnable_from = 33_000_000
        original(self, memory)

    monkeypatch.setattr(FakeDevice, "pin", pin)
    with pytest.raises(RunFailed, match="PinnedMemoryError: 'weights' needs .*hardware.pinned_memory_gb") as error:
        run_experiment(composed("machine=cuda", *SMOKE, f"results_dir={tmp_path}"))
    assert error.value.status == "oom"


def test_strategies_of_the_benchmark_share_pinned_memory(devices, monkeypatch, tmp_path):
    """As on a GPU: memory is pinned once, whatever the strategies."""
    monkeypatch.setattr(pinned, "_KEEP_FROM_BYTES", 100_000)
    device = cuda.TorchCudaRuntime()
    monkeypatch.setattr(cuda, "TorchCudaRuntime", lambda: device)
    scale = replace(dry_scale("moelens,ondemand"), machine="cuda")
    with pinned.keeping():
        runs.take_memory(scale)
        kept = dict(device.pinned)
        found = runs.measure_strategies(scale, tmp_path, ["hardware.h2d_gb_s=9"], 600.0, lambda found: None)["runs"]
        assert kept.items() <= device.pinned.items()
        assert max(size for start, size in device.pinned.items() if start not in kept) < max(kept.values())
    assert [(run["status"], run["label"]) for run in found.values()] == [("ok", "measured")] * 2
    assert not device.pinned
