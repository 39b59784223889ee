"""What ops of a device lane see: tensors over the arenas, and copies that go to the lane's stream."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
import torch

from harness.machine.base import Lane, LaneKind
from harness.machine.device.arenas import DeviceArenas
from harness.machine.device.runtime import DeviceRuntime
from harness.machine.device.staging import Slot
from harness.memory.tiers import Buffer

TakeSlot = Callable[[int], Slot | None]


class DeviceContext:
    """Context of one packet. Nothing here waits for the device, but for data that no staging ring holds.

    `take` finds room in the staging ring of the packet's stream, waiting for packets before it if it must; None where
    there never will be enough. `slots` and `fills` are for whoever sees the packet end: memory to give back, and
    (target, memory) of what is then to be copied on within the host.
    """

    def __init__(self, lane: Lane, arenas: DeviceArenas, runtime: DeviceRuntime, stream: Any, take: TakeSlot) -> None:
        self.lane = lane
        self._arenas = arenas
        self._runtime = runtime
        self._stream = stream
        self._take = take
        self.slots: list[Slot] = []
        self.fills: list[tuple[torch.Tensor, torch.Tensor]] = []

    def memo(self, buffer: Buffer) -> dict[Hashable, Any]:
        return self._arenas.memo(buffer)

    def tensor(self, buffer: Buffer, shape: Sequence[int], dtype: str) -> torch.Tensor:
        return self._arenas.tensor(buffer, shape, dtype)

    def num_threads(self) -> int:
        return 1

    def copy(self, dst: Buffer, src: Buffer, offset_bytes: int, nbytes: int) -> None:
        part = slice(offset_bytes, offset_bytes + nbytes)
        self.move(self._arenas.bytes_of(dst)[part], self._arenas.bytes_of(src)[part])

    def move(self, dst: torch.Tensor, src: torch.Tensor | np.ndarray) -> None:
        source = torch.from_numpy(src) if isinstance(src, np.ndarray) else src
        if source.numel() == 0:
            return
        if self.lane.kind is LaneKind.H2D:
            self._to_device(dst, source)
        else:
            assert self.lane.kind is LaneKind.D2H, f"an op on lane {self.lane} moves data: copy lanes do"
            self._to_host(dst, source)

    def host_value(self, source: torch.Tensor) -> np.ndarray:
        value = torch.empty(source.shape, dtype=source.dtype)
        if source.numel():
            self._to_host(value, source)
        return value.numpy()

    def _to_device(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        if not self._is_direct(src) or src.dtype != dst.dtype:
            staged = self._staged(src.shape, dst.dtype)
            if staged is None:
                self._runtime.copy_now(dst, src, self._stream)
                return
            src = staged.copy_(src)
        self._runtime.copy(dst, src, self._stream)

    def _to_host(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        if self._is_direct(dst) and src.dtype == dst.dtype:
            self._runtime.copy(dst, src, self._stream)
            return
        staged = self._staged(src.shape, src.dtype)
        if staged is None:
            self._runtime.copy_now(dst, src, self._stream)
            return
        self._runtime.copy(staged, src, self._stream)
        self.fills.append((dst, staged))

    def _is_direct(self, host: torch.Tensor) -> bool:
        """The device can read or write it as it is."""
        return host.is_contiguous() and self._arenas.is_pinned(host)

    def _staged(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor | None:
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        slot = self._take(nbytes)
        if slot is None:
            return None
        self.slots.append(slot)
        return slot.memory.view(dtype).view(tuple(shape))
