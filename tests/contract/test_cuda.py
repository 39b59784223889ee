"""The CUDA machine over a device whose streams are threads: every strategy exact, and what is forgotten is caught."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import yaml

import kernels
from harness.engine import loop
from harness.engine.ops import warm_up
from harness.engine.ops.warm_up import StartThreads
from harness.machine.base import CPU, GPU, Lane, LaneKind, MachineError
from harness.machine.device import issuing
from harness.machine.device.context import DeviceContext
from kernels import triton as gpu
from tests.conftest import ROOT
from tests.contract.running import CAPACITIES_BYTES, check_tokens, engine_on, requests, run_to_end, strategy_of
from tests.contract.test_strategies import CASES, IDS, PLANNED, YAMLS
from tests.fake_device import FakeDevice, cuda_machine

pytestmark = pytest.mark.usefixtures("short_probes")


def outcome(tiny, values, seed: int = 0, **settings) -> str:
    """ "right", "wrong tokens", or the text of what ended the run."""
    device = FakeDevice(seed)
    machine = cuda_machine(CAPACITIES_BYTES, device=device, **settings)
    work = requests(8, vocab_size=tiny.spec.vocab_size, longest=40, max_new_tokens=4, seed=seed)
    try:
        engine = engine_on(machine, tiny, work, kv_blocks=60)
        run_to_end(engine, lambda e: strategy_of(e, values))
        report = check_tokens(tiny, engine.sequences)
    except (MachineError, AssertionError) as error:
        return f"error: {error}"
    finally:
        machine.close()
        device.close()
    assert report.checked == len(work)
    assert not device.pinned, "pinned memory was not given back"
    return "right" if report.ok else "wrong tokens"


@pytest.mark.parametrize(("name", "change"), CASES, ids=IDS)
def test_every_strategy_gives_the_same_tokens(tiny, name, change):
    assert outcome(tiny, PLANNED[name] | change) == "right"


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("settings", [{}, {"copies_in_flight": 1, "gpu_ops_in_flight": 1, "launch_mb": 0.0}])
def test_however_far_the_launching_threads_run_ahead(tiny, seed, settings):
    assert outcome(tiny, PLANNED["moelens"] | {"packet_mb": 0.02, "n_real": 40}, seed, **settings) == "right"


def forgets_streams(monkeypatch):
    """No stream waits for another one's event."""
    monkeypatch.setattr(FakeDevice, "wait", lambda self, stream, event: None)


def forgets_the_gpu(monkeypatch):
    """Host lanes start when a device op was launched, not when it has ended."""
    monkeypatch.setattr(issuing, "joined_by_stream", lambda first, second: first.kind in issuing.DEVICE_LANES)


def forgets_to_fill(monkeypatch):
    """Values are handed out as they were before the copy to the host."""
    original = DeviceContext._to_host

    def to_host(self, dst, src):
        original(self, dst, src)
        for staged in self.staged:
            staged.target = None

    monkeypatch.setattr(DeviceContext, "_to_host", to_host)


GPU_ATTENTION = {"attention": "gpu", "gpu_kv_staging_mb": 0.02}


@pytest.fixture
def gathering(monkeypatch):
    """The streams run what stands for the kernel that reads pinned memory, which counts how often."""
    pytest.importorskip("triton", reason="Triton is not installed (extra `test`, on Linux only)")
    calls = []

    def gather(caches, numbers, num_seqs, max_blocks, out):
        calls.append(num_seqs)
        lengths, tables = numbers[num_seqs : 2 * num_seqs].int(), numbers[2 * num_seqs :].int()
        kernels.kv_gather(caches, tables.view(num_seqs, max_blocks), lengths, out)

    monkeypatch.setattr(gpu, "gather_kv", gather, raising=False)
    monkeypatch.setattr(gpu, "serves", lambda tensor, kernel: kernel == "copies")
    monkeypatch.setattr(warm_up, "warm_up", lambda *of: None)  # it would compile kernels for a GPU
    return calls


def test_what_a_kernel_gathers_is_there_when_its_turn_comes(tiny, gathering):
    assert [outcome(tiny, PLANNED["moelens"] | GPU_ATTENTION, seed) for seed in range(3)] == ["right"] * 3
    assert gathering


def test_numbers_that_are_given_back_early_show(tiny, gathering, monkeypatch):
    original = DeviceContext.gather

    def gather(self, *of):
        def give_back(staged):
            staged.memory.fill_(0)
            self._give_back(staged.slot)

        with monkeypatch.context() as patch:
            patch.setattr(self, "_behind", give_back)
            original(self, *of)

    monkeypatch.setattr(DeviceContext, "gather", gather)
    assert outcome(tiny, PLANNED["moelens"] | GPU_ATTENTION) != "right"
    assert gathering


@pytest.mark.parametrize("plant", [forgets_streams, forgets_the_gpu, forgets_to_fill])
def test_what_is_forgotten_shows(tiny, monkeypatch, plant):
    plant(monkeypatch)
    assert any(outcome(tiny, PLANNED["moelens"] | {"n_real": 60}, seed) != "right" for seed in range(3))


@pytest.mark.parametrize("name", YAMLS)
def test_nothing_blocks_or_allocates_within_a_pass(tiny, name):
    device = FakeDevice()
    machine = cuda_machine(CAPACITIES_BYTES, device=device, poison=False)
    engine = engine_on(machine, tiny, requests(6, vocab_size=tiny.spec.vocab_size), kv_blocks=60)
    try:
        strategy = strategy_of(engine, PLANNED[name])
        machine.drain()
        assert {"allocate", "pin"} <= set(device.blocking)
        firsts = {GPU: "warm up", CPU: "start threads", Lane(LaneKind.PIN): "start threads"}
        found = {lane: next(span.kind for span in machine.spans if span.lane == lane) for lane in firsts}
        assert found == firsts, "before any other work"
        device.blocking.clear()
        loop.run(engine, strategy, lambda passed: None)
        assert not device.blocking
    finally:
        machine.close()
        device.close()


def test_the_threads_of_a_host_lane_start_once():
    """Others may end meanwhile."""
    known, started = set(os.listdir("/proc/self/task")), []
    for _ in range(2):
        StartThreads().run(SimpleNamespace(num_threads=lambda: 23), 0)
        there = set(os.listdir("/proc/self/task"))
        started.append(len(there - known))
        known |= there
    assert started == [22, 0]


@pytest.mark.cuda
@pytest.mark.parametrize("name", YAMLS)
def test_every_strategy_on_a_real_gpu(tiny, name):
    """The same with torch's streams, where there are any."""
    from harness.machine.cuda import Config, CudaMachine, device_found
    from harness.machine.device.runtime import TorchCudaRuntime

    if not device_found():
        pytest.skip("no GPU that torch can use")
    machine = CudaMachine(
        runtime=TorchCudaRuntime(), capacities_bytes=CAPACITIES_BYTES, config=Config(poison=True, staging_mb=0.05)
    )
    work = requests(8, vocab_size=tiny.spec.vocab_size)
    try:
        engine = engine_on(machine, tiny, work, kv_blocks=60)
        run_to_end(engine, lambda e: strategy_of(e, yaml.safe_load((ROOT / f"conf/strategy/{name}.yaml").read_text())))
        report = check_tokens(tiny, engine.sequences)
    finally:
        machine.close()
    assert report.checked == len(work)
    assert report.ok, report.first_mismatch
