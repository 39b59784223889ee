"""Copies of the CUDA machine's lanes: any source, any target, any size, and nothing that blocks where it need not."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kernels
from harness.machine.base import D2H, GPU, H2D, PIN
from harness.machine.device.staging import StagingRing
from harness.memory.transfers import CopyPage, StagePage
from tests.fake_device import FakeDevice, cuda_machine
from tests.unit.machine.ops import FreeOp


class Run(FreeOp):
    """Calls a function of the context."""

    kind = "run"

    def __init__(self, run, **touches: tuple) -> None:
        self._run = run
        self.reads, self.writes = touches.get("reads", ()), touches.get("writes", ())

    def run(self, ctx, packet):
        return self._run(ctx)


def paged(source: torch.Tensor, block_size: int = 4, most: int = 3000):
    """Return a cache of one number a token, and the tables and lengths of the sequences that give `source` in turn."""
    flat = source.flatten()
    lengths = [min(most, len(flat) - first) for first in range(0, len(flat), most)]
    per_sequence = -(-most // block_size)
    cache = torch.zeros(len(lengths) * per_sequence, 1, block_size, 1, dtype=source.dtype)
    for number, part in enumerate(flat.split(most)):
        cache[number * per_sequence :].flatten()[: len(part)] = part
    tables = torch.arange(len(cache), dtype=torch.int32).view(len(lengths), per_sequence)
    return [cache], tables, torch.tensor(lengths, dtype=torch.int32)


@pytest.fixture
def moved(cuda):
    """Sends a source to the device and back by the ways that `to_device` and `to_host` are, and gives what comes."""
    machine = cuda(staging_mb=0.05)
    device, pinned = (machine.tiers[name].reserve("data", 1 << 20) for name in ("device", "pinned"))

    def roundtrip(source: torch.Tensor, way: str) -> np.ndarray:
        shape = tuple(source.shape)
        names = {v: k for k, v in {"float32": torch.float32, "int64": torch.int64}.items()}
        dtype = names[source.dtype]

        def up(ctx):
            src = source
            if way == "pinned":
                src = ctx.tensor(pinned, shape, dtype)
                src.copy_(source)
            if way == "gathered":
                ctx.gather(ctx.tensor(device, (source.numel(),), dtype), *paged(source))
            else:
                ctx.move(ctx.tensor(device, shape, dtype), src)

        machine.submit(H2D, Run(up, writes=(device,)))
        ticket = machine.submit(D2H, Run(lambda ctx: ctx.host_value(ctx.tensor(device, shape, dtype)), reads=(device,)))
        return machine.wait(ticket)

    return roundtrip


SOURCES = {
    "contiguous": torch.arange(600, dtype=torch.float32).view(20, 30),
    "transposed": torch.arange(600, dtype=torch.int64).view(20, 30).T,
    "strided": torch.arange(600, dtype=torch.float32)[::3],
    "larger than the staging memory": torch.arange(30_000, dtype=torch.int64),
    "many rows": torch.arange(90_000, dtype=torch.float32).view(300, 300).T,
    "a row larger than the staging memory": torch.arange(30_000, dtype=torch.int64).view(1, -1),
    "scalar": torch.tensor(7.0),
    "empty": torch.empty(0, 3),
}


@pytest.mark.parametrize("way", ["pageable", "pinned", "gathered"])
@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES.keys())
def test_what_goes_to_the_device_comes_back(moved, device, source, way):
    device.blocking.clear()
    value = moved(source, way)
    assert value.shape == tuple(source.shape)
    assert np.array_equal(value, source.numpy())
    too_large = source.dim() == 2 and len(source) == 1
    assert ("copy_now" in device.blocking) == too_large


@pytest.mark.parametrize("seed", range(3))
def test_one_packet_may_move_more_pieces_than_the_ring_holds(seed):
    """As LoadKv does. Its own earlier copies make room; pieces are neither lost nor mixed up."""
    slow = FakeDevice(seed)
    machine = cuda_machine({"device": 1 << 20, "pinned": 1 << 20}, device=slow, staging_mb=0.004)
    buffer = machine.tiers["device"].reserve("data", 1 << 16)
    pieces = [torch.randint(1 << 40, (n % 90 + 1,)) for n in range(100)]
    rows = [slice(80 * n, 80 * n + len(piece)) for n, piece in enumerate(pieces[:60])]

    def up(ctx):
        for row, piece in zip(rows, pieces, strict=False):
            ctx.move(ctx.tensor(buffer, (8192,), "int64")[row], piece.flip(0).flip(0))

    def down(ctx):
        return [ctx.host_value(ctx.tensor(buffer, (8192,), "int64")[row]) for row in rows]

    try:
        slow.blocking.clear()
        for _ in range(3):
            machine.submit(H2D, Run(up, writes=(buffer,)))
        values = machine.wait(machine.submit(D2H, Run(down, reads=(buffer,))))
    finally:
        machine.close()
        slow.close()
    assert all(np.array_equal(value, piece) for value, piece in zip(values, pieces, strict=False))
    assert not slow.blocking


def test_values_of_several_fetches_stay_what_they_were(cuda, device):
    """Their staging memory is used again; a strategy may keep a value for ever."""
    machine = cuda(staging_mb=0.002)
    buffer = machine.tiers["device"].reserve("data", 1 << 12)
    tickets = []
    for number in range(50):
        machine.submit(GPU, Run(lambda ctx, n=number: ctx.tensor(buffer, (100,), "int64").fill_(n), writes=(buffer,)))
        fetch = Run(lambda ctx: ctx.host_value(ctx.tensor(buffer, (100,), "int64")), reads=(buffer,))
        tickets.append(machine.submit(D2H, fetch, urgent=number % 3 == 0))
    values = [machine.wait(ticket) for ticket in tickets]
    assert [set(value.tolist()) for value in values] == [{number} for number in range(50)]
    assert "copy_now" not in device.blocking


def test_a_compute_lane_moves_nothing(cuda):
    machine = cuda()
    buffer = machine.tiers["device"].reserve("data", 64)
    ticket = machine.submit(GPU, Run(lambda ctx: ctx.move(ctx.tensor(buffer, (8,), "uint8"), np.zeros(8, np.uint8))))
    with pytest.raises(RuntimeError, match="copy lanes do"):
        machine.wait(ticket)


def test_the_gpu_lane_sees_no_host_memory(cuda):
    """What an op does there would happen when it is launched, before the copies that it follows."""
    machine = cuda()
    pinned = machine.tiers["pinned"].reserve("page", 64)
    ticket = machine.submit(GPU, Run(lambda ctx: ctx.tensor(pinned, (64,), "uint8").fill_(0), writes=(pinned,)))
    with pytest.raises(RuntimeError, match="an op on lane gpu touches 'page' in pinned memory"):
        machine.wait(ticket)


def test_packets_that_are_launched_together_are_one_copy(cuda, device, monkeypatch):
    """As many as `launch_mb` says, and no more; those that do not follow each other stay apart."""
    machine, copies = cuda(launch_mb=0.004), []
    source, target = (machine.tiers[name].reserve("data", 10_000) for name in ("pinned", "device"))
    plain = device.copy
    monkeypatch.setattr(device, "copy", lambda dst, src, stream: copies.append(len(src)) or plain(dst, src, stream))
    machine._memory.bytes_of(source)[:] = torch.arange(10_000).to(torch.uint8)
    page = CopyPage(source, target, nbytes=9_500, layer=0, packet_bytes=1000)
    machine.wait(machine.submit(H2D, page))
    assert copies == [4000, 4000, 1500]
    assert torch.equal(machine._memory.bytes_of(target)[:9500], machine._memory.bytes_of(source)[:9500])

    def apart(ctx):
        for start in (0, 200, 100, 300):
            ctx.copy(target, source, start, 100)

    copies.clear()
    machine.wait(machine.submit(H2D, Run(apart, reads=(source,), writes=(target,))))
    assert copies == [100] * 4


def test_weights_are_staged_by_several_threads_that_are_not_those_of_the_cpu_lane(cuda, monkeypatch):
    """Pools of threads are shared by their size, and those of one pool would take turns."""
    threads, plain = [], kernels.stream_copy
    note = lambda dst, src, num_threads: threads.append(num_threads) or plain(dst, src, num_threads=num_threads)  # noqa: E731
    monkeypatch.setattr(kernels, "stream_copy", note)
    for settings, expected in (({"cpu_threads": 1}, 4), ({"cpu_threads": 4}, 5), ({"pin_threads": 2}, 2)):
        machine = cuda(**settings)
        source, target = (machine.tiers["pinned"].reserve(name, 3000) for name in ("pages", "staged"))
        machine._memory.bytes_of(source)[:] = torch.arange(3000).to(torch.uint8)
        machine.wait(machine.submit(PIN, StagePage(source, target, nbytes=3000, layer=0, packet_bytes=1000)))
        assert threads == [expected] * 3
        assert torch.equal(machine._memory.bytes_of(target), machine._memory.bytes_of(source))
        threads.clear()


@given(st.lists(st.tuples(st.integers(0, 900), st.integers(0, 3)), max_size=60))
def test_slots_of_a_ring_never_overlap_and_come_when_there_is_room(steps):
    """Against intervals written down; each step takes a slot and gives some of the oldest back."""
    ring, held = StagingRing(torch.zeros(2048, dtype=torch.uint8)), []
    for number, (nbytes, num_back) in enumerate(steps):
        slot = ring.take(nbytes)
        if slot is None:
            assert held, "an empty ring has room for anything that fits it"
        else:
            assert slot.memory.numel() == nbytes
            slot.memory.fill_(number % 251)
            held.append((slot, number % 251))
        for kept, value in held:
            assert (kept.memory == value).all(), "a slot was handed out twice"
        for _ in range(min(num_back, len(held))):
            ring.give_back(held.pop(0)[0])


def test_more_than_a_ring_holds_is_refused():
    ring = StagingRing(torch.zeros(1024, dtype=torch.uint8))
    assert ring.take(1025) is None
    assert ring.take(1024) is not None
    assert ring.take(1) is None
