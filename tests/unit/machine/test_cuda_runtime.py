"""torch.cuda as the machine uses it, on a GPU: what a device of threads cannot tell."""

from __future__ import annotations

import ctypes
import mmap

import pytest
import torch

from harness.machine.cuda import device_found, device_lost
from harness.machine.device.links import link_rates_gb_s
from harness.machine.device.pinned import HostMemory
from harness.machine.device.runtime import DeviceError, TorchCudaRuntime

pytestmark = pytest.mark.cuda
MB = 1 << 20


@pytest.fixture
def runtime():
    if not device_found():
        pytest.skip("no GPU that torch can use")
    runtime = TorchCudaRuntime()
    yield runtime
    torch.cuda.synchronize()
    assert device_lost() is None


def test_registered_memory_is_pinned_for_torch_and_for_copies(runtime):
    host = HostMemory()
    memory = host.pinned(64 * MB, "test", runtime, print)
    try:
        assert memory.is_pinned()
        rates = link_rates_gb_s(runtime, {"h2d": memory, "d2h": memory.clone().pin_memory()})
        assert min(rates.values()) > 0.5, f"pageable memory is slower than any link: {rates}"
        stream, last = runtime.stream(), runtime.event()
        target = runtime.allocate(memory.nbytes)
        memory[:] = 7
        runtime.copy(target, memory, stream)
        runtime.record(last, stream)
        runtime.synchronize(last)
        assert int(target.sum(dtype=torch.int64)) == 7 * memory.nbytes
    finally:
        host.give_back(memory, runtime)
    assert not memory.is_pinned()


def test_a_refusal_to_pin_is_not_found_again_by_the_next_kernel(runtime):
    area = torch.frombuffer(mmap.mmap(-1, MB), dtype=torch.uint8)
    runtime.pin(area)
    with pytest.raises(DeviceError, match="cudaHostRegister failed"):
        runtime.pin(area)
    assert float(torch.ones(4, device="cuda").sum()) == 4
    runtime.unpin(area)
    with pytest.raises(DeviceError, match="cudaHostUnregister failed"):
        runtime.unpin(area)
    assert float(torch.ones(4, device="cuda").sum()) == 4


def test_machines_one_after_another_leave_no_workspaces_of_cublas(runtime):
    def held_by_a_machine() -> int:
        one = TorchCudaRuntime()
        a = torch.ones(256, 256, device="cuda", dtype=torch.bfloat16)
        one.launch(one.stream(), lambda: torch.mm(a, a))
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    first = held_by_a_machine()
    assert max(held_by_a_machine() for _ in range(8)) <= first + MB


def test_memory_is_limited_and_comes_back(runtime):
    try:
        runtime.limit_memory(torch.cuda.memory_reserved() + 128 * MB)
        held = runtime.allocate(64 * MB)
        with pytest.raises(torch.OutOfMemoryError):
            runtime.allocate(96 * MB)
        del held
        runtime.release_unused()
        runtime.allocate(96 * MB)
    finally:
        runtime.limit_memory(runtime.total_bytes)


def test_the_peak_of_temporaries_is_that_since_the_last_call(runtime):
    kept = runtime.allocate(64 * MB)
    runtime.peak_temporaries_bytes()
    passing = runtime.allocate(24 * MB)
    del passing
    assert runtime.peak_temporaries_bytes() == pytest.approx(24 * MB, abs=MB), "what was held before is none"
    assert runtime.peak_temporaries_bytes() == 0
    assert kept.nbytes == 64 * MB


def test_streams_wait_for_events_and_tell_their_times(runtime):
    """A stream that waits sees what the other one wrote, and sleeping for it takes no processor."""
    slow, waiting, written, read = runtime.stream(), runtime.stream(urgent=True), runtime.event(), runtime.event()
    source, target = (runtime.allocate(256 * MB) for _ in range(2))
    first = runtime.event()
    runtime.record(first, slow)
    runtime.launch(slow, lambda: [source.fill_(value) for value in range(20)])
    runtime.record(written, slow)
    runtime.wait(waiting, written)
    runtime.launch(waiting, lambda: target.copy_(source))
    runtime.record(read, waiting)
    runtime.synchronize(read)
    assert runtime.query(written) and int(target[-1]) == 19
    assert 0 < runtime.elapsed_s(first, written) < runtime.elapsed_s(first, read) < 10


@pytest.mark.parametrize("nbytes", [5, 4096, 8 * MB, 9 * MB])
def test_urgent_copies_bring_the_same_bytes(runtime, nbytes):
    """Small ones are read by a kernel, large ones copied."""
    host = HostMemory()
    memory = host.pinned(nbytes, "urgent", runtime, print)
    memory.random_(0, 256)
    stream, last, target = runtime.stream(urgent=True), runtime.event(), runtime.allocate(nbytes)
    runtime.copy(target, memory, stream)
    runtime.record(last, stream)
    runtime.synchronize(last)
    assert torch.equal(target.cpu(), memory)
    host.give_back(memory, runtime)


def test_memory_of_this_process_is_not_locked_beyond_its_pages(runtime):
    """cudaHostRegister takes whole pages: of memory that is no multiple of them, too."""
    host = HostMemory()
    memory = host.pinned(3 * mmap.PAGESIZE + 5, "odd", runtime, print)
    ctypes.memset(memory.data_ptr(), 1, memory.nbytes)
    target = runtime.allocate(memory.nbytes)
    runtime.copy_now(target, memory, runtime.stream())
    assert int(target.sum()) == memory.nbytes
    host.give_back(memory, runtime)
