"""Planned device memory over an allocator that keeps and cuts what was freed, as torch's does."""

from __future__ import annotations

import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.machine.base import GPU
from tests.fake_device import FakeDevice, cuda_machine
from tests.unit.machine.ops import Quick

MB = 1 << 20


class KeepingDevice(FakeDevice):
    """`allocate` takes the smallest free piece that suffices and cuts it; only whole segments go back to the device."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(longest_pause_s=0.0)
        self.limit_memory(limit_bytes)
        self.segments: list[list[list[int]]] = []  # of pieces [bytes, in use]

    @property
    def taken_bytes(self) -> int:
        return sum(piece[0] for segment in self.segments for piece in segment)

    def allocate(self, nbytes: int) -> torch.Tensor:
        pieces = [(piece, i, j) for i, segment in enumerate(self.segments) for j, piece in enumerate(segment)]
        if free := [(size, i, j) for (size, in_use), i, j in pieces if not in_use and size >= nbytes]:
            _, number, place = min(free)
            segment = self.segments[number]
        else:
            if self.taken_bytes + nbytes > self._limit_bytes:
                self.release_unused()
            if self.taken_bytes + nbytes > self._limit_bytes:
                raise torch.OutOfMemoryError(f"{nbytes} bytes, {self.taken_bytes} of {self._limit_bytes} are taken")
            segment, place = [[nbytes, 0]], 0
            self.segments.append(segment)
        left = segment[place][0] - nbytes
        piece = [nbytes, 1]
        segment[place : place + 1] = [piece, *([[left, 0]] if left else [])]
        found = super().allocate(nbytes)
        weakref.finalize(found, self._free, segment, piece)
        return found

    @staticmethod
    def _free(segment: list[list[int]], piece: list[int]) -> None:
        piece[1] = 0
        if not any(in_use for _, in_use in segment):
            segment[:] = [[sum(nbytes for nbytes, _ in segment), 0]]

    def release_unused(self) -> None:
        super().release_unused()
        self.segments[:] = [segment for segment in self.segments if any(in_use for _, in_use in segment)]


@pytest.fixture
def reserved():
    """Makes a device's tier with so much memory; the machine is closed behind the test."""
    made = []

    def make(limit_bytes: int):
        device = KeepingDevice(limit_bytes)
        made.append((device, cuda_machine({"device": limit_bytes}, device=device, poison=False)))
        return device, made[-1][1]

    yield make
    for device, machine in made:
        machine.close()
        device.close()


def test_what_was_released_is_not_cut_for_something_smaller(reserved):
    """As between the profiler's buffers and those of the plan, which fills the memory."""
    _, machine = reserved(10 * MB)
    tier = machine.tiers["device"]
    tier.release(tier.reserve("of the profiler", 6 * MB))
    tier.reserve("small", 3 * MB)
    tier.reserve("large", 6 * MB)
    assert tier.free_bytes == 1 * MB


def test_room_for_temporaries_stays_when_other_memory_goes(reserved):
    device, machine = reserved(10 * MB)
    tier = machine.tiers["device"]
    other = tier.reserve("of the profiler", 4 * MB)
    tier.reserve("workspace", 3 * MB, backed=False)
    tier.release(other)
    tier.reserve("of the plan", 5 * MB)
    machine.wait(machine.submit(GPU, Quick()))  # the room is taken on the stream where temporaries are
    assert [3 * MB, 0] in [piece for segment in device.segments for piece in segment]


sizes = st.integers(1, 6)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(sizes, st.booleans(), st.integers(0, 5)), max_size=12))
def test_whatever_fits_the_plan_fits_the_device(steps):
    device = KeepingDevice(12 * MB)
    machine = cuda_machine({"device": 12 * MB}, device=device, poison=False)
    tier, held = machine.tiers["device"], []
    try:
        for size, releases, which in steps:
            if releases and held:
                tier.release(held.pop(which % len(held)))
            elif size * MB <= tier.free_bytes:
                held.append(tier.reserve("something", size * MB))
        assert device.taken_bytes <= 12 * MB
    finally:
        machine.close()
        device.close()
