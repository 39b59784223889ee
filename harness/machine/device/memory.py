"""Memory behind buffers where there is a device: its own for the device tier, pinned and pageable host memory."""

from __future__ import annotations

from bisect import bisect_right, insort
from typing import Any

import torch

from harness.machine.device.pinned import HostMemory, Progress
from harness.machine.device.runtime import DeviceError, DeviceRuntime
from harness.machine.threads.arenas import Arenas
from harness.memory.tiers import Buffer


class DeviceArenas(Arenas):
    """One allocation a root buffer, made while planning. `progress` is told of pinned memory that takes its time."""

    def __init__(
        self, runtime: DeviceRuntime, compute: Any, host: HostMemory, *, poison: bool, progress: Progress
    ) -> None:
        """Take `compute`, the stream on which ops allocate their temporaries."""
        super().__init__(poison)
        self._runtime = runtime
        self._compute = compute
        self._host = host
        self._tell = progress
        self._pinned: list[tuple[int, int]] = []  # (first address, one behind the last), ascending
        self._room: list[Buffer] = []  # for temporaries
        self._released = False  # device memory, which torch's allocator still has

    def back(self, buffer: Buffer) -> None:
        if buffer.tier == "device":
            self._let_go_of_released()
        super().back(buffer)
        if buffer.tier == "device" and not buffer.backed:
            self._room.append(buffer)
            self._take_room(buffer.nbytes)
        self._runtime.settle()

    def _let_go_of_released(self) -> None:
        """Give released buffers back to the device.

        Torch would cut a released buffer into pieces for smaller ones, and have no whole piece for the next that is
        large, though the plan holds.
        """
        if self._released:
            self._released = False
            self._runtime.release_unused()
            self._take_room(max((buffer.nbytes for buffer in self._room), default=0))

    def _take_room(self, nbytes: int) -> None:
        """Take memory for temporaries once and leave it with torch's allocator, which then has it during a pass."""
        if nbytes:
            self._runtime.launch(self._compute, lambda: self._runtime.allocate(nbytes).zero_())

    def _allocate(self, buffer: Buffer) -> torch.Tensor:
        if buffer.tier == "device":
            return self._runtime.allocate(buffer.nbytes)
        if buffer.tier != "pinned" or not buffer.nbytes:
            self._host.require_pageable(buffer.nbytes, buffer.name)
            return super()._allocate(buffer)
        memory = self._host.pinned(buffer.nbytes, buffer.name, self._runtime, self._tell)
        insort(self._pinned, (memory.data_ptr(), memory.data_ptr() + memory.nbytes))  # lanes may be searching it
        return memory

    def unback(self, buffer: Buffer) -> None:
        if buffer.tier == "device":
            self._released = True
            self._room = [other for other in self._room if other is not buffer]
        if buffer.tier == "pinned" and buffer.nbytes and buffer.backed:
            memory = self.bytes_of(buffer)
            self._pinned.remove((memory.data_ptr(), memory.data_ptr() + memory.nbytes))
            try:
                self._host.give_back(memory, self._runtime)
            finally:
                super().unback(buffer)
            return
        super().unback(buffer)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Tell whether the tensor, contiguous, lies in pinned memory of these arenas."""
        start = tensor.data_ptr()
        place = bisect_right(self._pinned, (start, 1 << 62)) - 1
        return place >= 0 and start + tensor.nbytes <= self._pinned[place][1]

    def close(self) -> None:
        """Give all memory back, whoever still holds the machine; nothing may be under way. DeviceError, in the end,
        where the device refused some of it."""
        refused: DeviceError | None = None
        for buffer in list(self._roots):
            try:
                self.unback(buffer)
            except DeviceError as error:
                refused = error
        if refused is not None:
            raise refused
