"""Give ops of a device lane what they see: tensors over the arenas, and copies that go to the lane's stream."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

import kernels
from harness.machine.base import Lane, LaneKind
from harness.machine.device.memory import DeviceArenas
from harness.machine.device.runtime import SMALL_COPY_BYTES, DeviceRuntime
from harness.machine.device.staging import Slot
from harness.machine.threads.arenas import tensor_of
from harness.memory.tiers import HOST_TIERS, Buffer
from kernels import triton as gpu

TakeSlot = Callable[[int], Slot | None]
_GATHERED_BYTES = 2 << 20  # or more in a copy of rows that were gathered on the host, so that the link is busy


@dataclass(eq=False, slots=True)
class Staged:
    """A piece of the staging ring with a copy between it and the device.

    `target` is what it is copied on to, within the host, when the copy has ended.
    """

    slot: Slot
    memory: torch.Tensor
    target: torch.Tensor | None = None
    event: Any = None  # behind the copy

    def fill(self) -> None:
        if self.target is not None:
            self.target.copy_(self.memory)


@dataclass(slots=True)
class _Run:
    """Holds the bytes of packets that follow each other, which go as one copy."""

    dst: Buffer
    src: Buffer
    start_bytes: int
    stop_bytes: int


class DeviceContext:
    """Context of some packets that are launched together. Nothing here waits for the device, but for room in a staging
    ring, or for a copy of data that are too large for it in one row.

    Packets that `copy` byte ranges one behind another become one copy of the device's, which is given to the stream by
    whatever else comes, or by `flush`. Ops of the gpu lane see device memory alone: what they do to host memory would
    happen when they are launched, not in their turn.

    `take` finds room in the staging ring of the packets' stream, waiting for packets before them if it must; None where
    these hold all of it themselves, or there never will be enough. `give_back` returns the oldest piece. `staged` is
    for whoever sees the packets end: to fill, and to give back. `copies_much` once a copy of theirs is large, which
    takes a copy engine.
    """

    def __init__(
        self,
        lane: Lane,
        arenas: DeviceArenas,
        runtime: DeviceRuntime,
        stream: Any,
        take: TakeSlot,
        give_back: Callable[[Slot], None],
    ) -> None:
        self.lane = lane
        self._arenas = arenas
        self._runtime = runtime
        self._stream = stream
        self._take = take
        self._give_back = give_back
        self.staged: deque[Staged] = deque()
        self.copies_much = False
        self._copying: _Run | None = None

    def memo(self, buffer: Buffer) -> dict[Hashable, Any]:
        return self._arenas.memo(buffer)

    def tensor(self, buffer: Buffer, shape: Sequence[int], dtype: str) -> torch.Tensor:
        is_host = self.lane.kind is LaneKind.GPU and buffer.tier in HOST_TIERS
        assert not is_host, f"an op on lane {self.lane} touches '{buffer.name}' in {buffer.tier} memory"
        return self._arenas.tensor(buffer, shape, dtype)

    def num_threads(self) -> int:
        return 1

    def copy(self, dst: Buffer, src: Buffer, offset_bytes: int, nbytes: int) -> None:
        run = self._copying
        if run is not None and (run.dst, run.src, run.stop_bytes) == (dst, src, offset_bytes):
            run.stop_bytes += nbytes
        else:
            self.flush()
            self._copying = _Run(dst, src, offset_bytes, offset_bytes + nbytes)

    def flush(self) -> None:
        """Give the stream what packets have asked to be copied until now."""
        run, self._copying = self._copying, None
        if run is not None:
            part = slice(run.start_bytes, run.stop_bytes)
            self.move(self._arenas.bytes_of(run.dst)[part], self._arenas.bytes_of(run.src)[part])

    def move(self, dst: torch.Tensor, src: torch.Tensor | np.ndarray) -> None:
        self.flush()
        source = tensor_of(src) if isinstance(src, np.ndarray) else src
        if source.numel() == 0:
            return
        if self.lane.kind is LaneKind.H2D:
            self._to_device(dst, source)
        else:
            assert self.lane.kind is LaneKind.D2H, f"an op on lane {self.lane} moves data: copy lanes do"
            self._to_host(dst, source)

    def gather(
        self, dst: torch.Tensor, caches: Sequence[torch.Tensor], tables: torch.Tensor, lengths: torch.Tensor
    ) -> None:
        """Let the GPU read what it needs, where it can; else gather on the host, some megabytes at a time."""
        self.flush()
        assert self.lane.kind is LaneKind.H2D, f"an op on lane {self.lane} gathers for the device"
        token_dim = sum(cache.shape[1] * cache.shape[3] for cache in caches)
        if gpu.serves(dst, "copies") and all(self._arenas.is_pinned(cache) for cache in caches):
            numbers = gpu.gather_numbers(tables, lengths, token_dim)
            if (staged := self._room(numbers.shape, numbers.dtype)) is not None:
                staged.memory.copy_(numbers)
                run = partial(gpu.gather_kv, caches, staged.memory, len(lengths), tables.shape[1], dst)
                self._runtime.launch(self._stream, run)
                return self._behind(staged)
        first = begin = 0
        ends = (lengths.long().cumsum(0) * token_dim).tolist()
        for stop, end in enumerate(ends, start=1):
            if stop == len(ends) or (end - begin) * dst.itemsize >= _GATHERED_BYTES:
                self._gather_on_host(dst[begin:end], caches, tables[first:stop], lengths[first:stop])
                first, begin = stop, end

    def _gather_on_host(self, dst: torch.Tensor, *of: Any) -> None:
        """Gather into the staging ring, or for a sequence that is larger than that, into pageable memory."""
        if dst.numel() == 0:
            return
        caches, tables, lengths = of
        staged = self._room(dst.shape, dst.dtype)
        if staged is None:
            gathered = torch.empty(dst.shape, dtype=dst.dtype)
            kernels.kv_gather(caches, tables, lengths, gathered)
            return self.move(dst, gathered)
        kernels.kv_gather(caches, tables, lengths, staged.memory)
        self._copy(dst, staged.memory)
        self._behind(staged)

    def host_value(self, source: torch.Tensor) -> np.ndarray:
        self.flush()
        value = torch.empty(source.shape, dtype=source.dtype)
        if source.numel():
            self._to_host(value, source)
        return value.numpy()

    def _to_device(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        if self._is_direct(src) and src.dtype == dst.dtype:
            self._copy(dst, src)
            return
        staged = self._room(src.shape, dst.dtype)
        if staged is not None:
            self._copy(dst, staged.memory.copy_(src))
            self._behind(staged)
        else:
            self._in_halves(self._to_device, dst, src)

    def _to_host(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        if self._is_direct(dst) and src.dtype == dst.dtype:
            self._copy(dst, src)
            return
        staged = self._room(src.shape, src.dtype)
        if staged is not None:
            self._copy(staged.memory, src)
            staged.target = dst
            self._behind(staged)
        else:
            self._in_halves(self._to_host, dst, src)

    def _copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        self.copies_much = self.copies_much or dst.nbytes > SMALL_COPY_BYTES
        self._runtime.copy(dst, src, self._stream)

    def _in_halves(self, move: Callable[[torch.Tensor, torch.Tensor], None], dst: torch.Tensor, src: Any) -> None:
        """Move what is too large for the ring in halves; a single row that is too large goes at once."""
        if not src.dim() or len(src) < 2:
            self._runtime.copy_now(dst, src, self._stream)
            return
        middle = len(src) // 2
        move(dst[:middle], src[:middle])
        move(dst[middle:], src[middle:])

    def _is_direct(self, host: torch.Tensor) -> bool:
        """Tell whether the device can read or write the tensor as it is."""
        return host.is_contiguous() and self._arenas.is_pinned(host)

    def _room(self, shape: Sequence[int], dtype: torch.dtype) -> Staged | None:
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        slot = self._take(nbytes)
        while slot is None and self.staged:
            oldest = self.staged.popleft()
            self._runtime.synchronize(oldest.event)
            oldest.fill()
            self._give_back(oldest.slot)
            slot = self._take(nbytes)
        return None if slot is None else Staged(slot, slot.memory.view(dtype).view(tuple(shape)))

    def _behind(self, staged: Staged) -> None:
        """Record that the copy of `staged` stands in the stream."""
        staged.event = self._runtime.event()
        self._runtime.record(staged.event, self._stream)
        self.staged.append(staged)
