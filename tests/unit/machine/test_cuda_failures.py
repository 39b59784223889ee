"""Whatever goes wrong on a device ends the run with its cause: never a hang, and no memory freed under a copy."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from harness.machine import cuda as cuda_module
from harness.machine.base import D2H, GPU, H2D, Lane, LaneKind, MachineError
from harness.machine.device import pinned
from harness.machine.device.pinned import HostMemory, PinnedMemoryError, free_bytes_by_limit
from harness.machine.device.runtime import DeviceError
from tests.fake_device import FakeDevice, cuda_machine
from tests.kernels.eventually import GIVE_UP_S, eventually
from tests.unit.machine.ops import FreeOp, Quick, Raising, Sleeping


def test_an_error_at_launch_names_the_op(cuda):
    machine = cuda()
    with pytest.raises(MachineError, match="raising layer 7 mb 1 on h2d failed: OutOfMemoryError: none left") as error:
        machine.wait(machine.submit(H2D, Raising(torch.OutOfMemoryError("none left"))))
    assert isinstance(error.value.__cause__, torch.OutOfMemoryError)


def test_an_error_that_the_device_finds_later_names_what_was_under_way(cuda, device):
    """As an illegal access does: the next event tells, and nothing runs any more."""
    machine = cuda()
    device.hold(True)
    bad = machine.submit(GPU, Raising(RuntimeError("an illegal memory access was encountered")))
    machine.submit(GPU, Quick())
    copied = machine.submit(D2H, Quick(), after=[bad])
    eventually(lambda: copied in machine._launched, meanwhile=machine.now)
    device.hold(False)
    with pytest.raises(MachineError, match="raising layer 7 mb 1 on gpu.*illegal memory access"):
        machine.wait(copied)
    with pytest.raises(MachineError, match="illegal memory access"):
        machine.submit(GPU, Quick())
    machine.close()
    assert not any(worker.is_alive() for worker in machine._workers)


def test_a_device_that_hangs_is_reported_and_its_memory_is_kept(cuda, device, monkeypatch):
    monkeypatch.setattr(cuda_module, "_never_freed", [])
    monkeypatch.setattr("harness.machine.threads.machine.CLOSE_TIMEOUT_S", 0.3)
    machine = cuda(watchdog_s=0.3)
    device.hold(True)
    ticket = machine.submit(GPU, Quick())
    eventually(lambda: ticket in machine._launched, meanwhile=machine.now)
    with pytest.raises(MachineError, match="(?s)watchdog: no packet finished.*quick on gpu runs"):
        machine.wait(ticket)
    machine.close()
    assert cuda_module._never_freed == [machine._memory]
    assert device.pinned


def test_close_waits_for_copies_under_way_and_then_frees(cuda, device):
    machine = cuda()
    ticket = machine.submit(GPU, Sleeping(0.05, packets=2000))
    machine.close()
    machine.close()
    assert not device.pinned
    assert ticket.packets_run < 2000
    with pytest.raises(MachineError, match="closed"):
        machine.submit(GPU, Quick())


class Copying(FreeOp):
    """Copies pinned memory to the device, then does what is asked."""

    kind = "copying"

    def __init__(self, target, source, then) -> None:
        self.target, self.source, self.then, self.writes = target, source, then, (target,)

    def run(self, ctx, packet):
        shape = (self.target.nbytes,)
        ctx.move(ctx.tensor(self.target, shape, "uint8"), ctx.tensor(self.source, shape, "uint8"))
        self.then()


@pytest.mark.parametrize("fails", [True, False], ids=["an op that fails", "a machine that is closed"])
def test_what_was_launched_before_the_end_is_waited_for(cuda, device, fails):
    """The launching thread is inside the op when the run ends: its copy must end before the memory is given back."""
    machine, begun, go_on = cuda(), threading.Event(), threading.Event()
    target, source = (machine.tiers[name].reserve("data", 1 << 12) for name in ("device", "pinned"))
    on_device, on_host = machine._memory.bytes_of(target).zero_(), machine._memory.bytes_of(source).fill_(7)
    arrived, original = [], device.unpin  # whether the copy was over when memory was given back

    def unpin(memory):
        arrived.append(torch.equal(on_device, on_host))
        original(memory)

    device.unpin = unpin

    def then():
        begun.set()
        assert go_on.wait(GIVE_UP_S)
        if fails:
            raise RuntimeError("not today")

    device.hold(True)
    machine.submit(H2D, Copying(target, source, then))
    assert begun.wait(GIVE_UP_S)
    closing = threading.Thread(target=machine.close)
    if not fails:
        closing.start()
        time.sleep(0.05)
    go_on.set()
    if fails:
        with pytest.raises(MachineError, match="copying on h2d failed: RuntimeError: not today"):
            machine.drain()
        closing.start()
    time.sleep(0.05)
    assert not arrived, "the copy has not even begun"
    device.hold(False)
    closing.join(GIVE_UP_S)
    assert arrived and all(arrived)
    assert not device.pinned


def test_there_is_one_gpu(cuda):
    machine = cuda()
    with pytest.raises(MachineError, match="one GPU"):
        machine.submit(Lane(LaneKind.GPU, 1), Quick())


def test_a_reservation_that_the_device_refuses_is_an_error_at_once(cuda, device):
    device.limit_memory(1000)
    with pytest.raises(torch.OutOfMemoryError):
        cuda().tiers["device"].reserve("weights", 2000)


def test_pinning_that_is_refused_names_the_setting_and_the_limits():
    device = FakeDevice()
    device.unpinnable_from = 10_000
    with pytest.raises(PinnedMemoryError) as error:
        cuda_machine({"pinned": 1 << 20}, device=device, staging_mb=0.02)
    text = str(error.value)
    for expected in ("hardware.pinned_memory_gb", "'h2d staging'", "out of memory", "RLIMIT_MEMLOCK", "MemAvailable"):
        assert expected in text


def test_memory_that_the_system_does_not_have_is_not_touched(monkeypatch):
    """Else the process would be killed. What grows while it is waited for is taken."""
    monkeypatch.setattr(pinned, "_CHUNK_BYTES", 1 << 20)
    monkeypatch.setattr(pinned, "_TELL_FROM_BYTES", 1 << 20)
    device, told = FakeDevice(), []
    limits = {"memory.max of the control group": 512 << 20, "MemAvailable of /proc/meminfo": 9 << 30}
    memory = HostMemory(threads=1, patience_s=0.0, read_limits=lambda: limits)
    with pytest.raises(PinnedMemoryError, match="the limit is memory.max of the control group, of which 0.5369 GB"):
        memory.pinned(1 << 22, "weights", device, told.append)
    grown = iter([512 << 20, 2 << 30, 2 << 30])
    memory = HostMemory(threads=2, patience_s=5.0, read_limits=lambda: {"limit": next(grown)})
    assert memory.pinned(1 << 22, "weights", device, told.append).sum() == 0
    assert told[-1].startswith("weights: 0.0 GB pinned in")


def test_memory_that_grows_with_use_is_taken_piece_by_piece(monkeypatch):
    """A virtual machine may have room for one piece, and for the next one once that is there."""
    monkeypatch.setattr(pinned, "_CHUNK_BYTES", 1 << 20)
    device, spare, asked = FakeDevice(), 1 << 29, []

    def limits():
        asked.append(len(touched))
        return {"limit": spare + (1 << 20)}

    touched: list[int] = []
    plain = pinned._touch
    monkeypatch.setattr(pinned, "_touch", lambda memory: touched.append(memory.nbytes) or plain(memory))
    memory = HostMemory(threads=8, patience_s=0.0, read_limits=limits)
    area = memory.pinned((3 << 20) + 5, "weights", device, print)
    assert touched == [1 << 20] * 3 + [5] and asked == [0, 1, 2, 3]
    memory.give_back(area, device)


def test_memory_that_the_system_does_not_map_is_an_error_that_names_the_setting():
    with pytest.raises(PinnedMemoryError, match=r"hardware.pinned_memory_gb\): the system does not map it"):
        HostMemory().pinned(1 << 60, "weights", FakeDevice(), print)


def test_what_waits_for_another_machine_is_given_up_where_memory_runs_short(monkeypatch):
    """The smallest first: the largest takes longest to pin again."""
    for name in ("_CHUNK_BYTES", "_KEEP_FROM_BYTES"):
        monkeypatch.setattr(pinned, name, 1 << 18)
    device, total = FakeDevice(), [(1 << 29) + (9 << 20)]
    limits = lambda: {"limit": total[0] - sum(device.pinned.values())}  # noqa: E731
    memory = HostMemory(threads=1, patience_s=0.0, read_limits=limits)
    with pinned.keeping():
        for nbytes in (6 << 20, 1 << 20):
            memory.give_back(memory.pinned(nbytes, "kept", device, print), device)
        assert len(device.pinned) == 2
        again = memory.pinned(1 << 20, "the same", device, print)
        assert len(device.pinned) == 2, "what fits is taken again"
        memory.give_back(again, device)
        memory.give_back(memory.pinned(2 << 20, "another", device, print), device)
        assert sorted(device.pinned.values()) == [1 << 20, 2 << 20, 6 << 20]
        area = memory.pinned(3 << 20, "more", device, print)
        assert sorted(device.pinned.values()) == [2 << 20, 3 << 20, 6 << 20], "the smallest made room"
        total[0] = 1 << 29
        with pytest.raises(PinnedMemoryError, match="'too much' needs"):
            memory.pinned(10 << 20, "too much", device, print)
        assert list(device.pinned.values()) == [3 << 20], "and all of it, before memory is refused"
        memory.give_back(area, device)
    assert not device.pinned


def test_pageable_memory_that_the_system_does_not_have_is_not_promised(monkeypatch):
    """A tensor of it would be had, and the process killed when it writes there."""
    monkeypatch.setattr(pinned, "_CHUNK_BYTES", 1 << 20)
    memory = HostMemory(patience_s=0.0, read_limits=lambda: {"MemAvailable of /proc/meminfo": 1 << 29})
    memory.require_pageable(1 << 20, "rows")
    told = r"'weights' needs 0.008389 GB of host memory \(hardware.host_memory_gb\); the limit is MemAvailable"
    with pytest.raises(PinnedMemoryError, match=told):
        memory.require_pageable(1 << 23, "weights")


def test_a_device_that_failed_does_not_hide_its_cause_when_memory_is_given_back(cuda, device, monkeypatch):
    """Nothing is unpinned by a device that has met an illegal access: that error must not take the other's place."""
    refusals = []

    def unpin(self, memory):
        refusals.append(memory)
        raise DeviceError("cudaHostUnregister failed: an illegal memory access was encountered")

    monkeypatch.setattr(FakeDevice, "unpin", unpin)
    machine = cuda()
    with pytest.raises(MachineError, match="not today"):
        machine.wait(machine.submit(GPU, Raising(RuntimeError("not today"))))
    machine.close()
    assert len(refusals) == 4, "all staging memory was tried"
    assert not machine._memory._roots
    other = FakeDevice()
    with pytest.raises(DeviceError, match="cudaHostUnregister"):
        cuda_machine({"pinned": 1 << 20}, device=other).close()
    other.close()


def test_limits_are_read_from_the_system(tmp_path):
    def put(path, text):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)

    assert free_bytes_by_limit(tmp_path) == {}
    put("proc/meminfo", "MemTotal: 9 kB\nMemAvailable:  2048 kB\n")
    put("sys/fs/cgroup/memory.max", "max\n")
    assert free_bytes_by_limit(tmp_path) == {"MemAvailable of /proc/meminfo": 2048 * 1024}
    put("proc/self/cgroup", "0::/job/1\n")
    put("sys/fs/cgroup/job/1/memory.max", "5000\n")
    put("sys/fs/cgroup/job/1/memory.current", "1500\n")
    assert free_bytes_by_limit(tmp_path)["memory.max of the control group"] == 3500
