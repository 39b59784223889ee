"""Give running ops what they see on machines made of host threads: views over arenas, and copies at a lane's rate."""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import kernels
from harness.machine.base import Lane, Work
from harness.machine.threads.arenas import Arenas, tensor_of
from harness.memory.tiers import Buffer

_CREDIT_S = 2e-3  # back-to-back packets may make up for this much lateness of the thread, so that the rate holds


@dataclass(frozen=True)
class LaneRate:
    """Caps that make a lane as slow as the machine it plays; None = as fast as it goes."""

    flops_s: float | None = None
    bytes_s: float | None = None
    link_bytes_s: float | None = None  # of a gpu lane: between GPUs

    def seconds(self, flops: float, nbytes: float, link_bytes: float = 0.0) -> float:
        """Return the least time that the caps allow."""
        flop_s = flops / self.flops_s if self.flops_s else 0.0
        byte_s = nbytes / self.bytes_s if self.bytes_s else 0.0
        link_s = link_bytes / self.link_bytes_s if self.link_bytes_s else 0.0
        return max(flop_s, byte_s, link_s)


class HostContext:
    """The context of one lane. Copies pay for their bytes as they go; `pace_compute` holds back what ran too fast."""

    def __init__(self, lane: Lane, arenas: Arenas, rate: LaneRate | None = None, threads: int = 1) -> None:
        self.lane = lane
        self._arenas = arenas
        self._rate = rate or LaneRate()
        self._threads = threads
        self._free_s = 0.0  # when this lane's link is free again

    def memo(self, buffer: Buffer) -> dict[Hashable, Any]:
        return self._arenas.memo(buffer)

    def tensor(self, buffer: Buffer, shape: Sequence[int], dtype: str) -> torch.Tensor:
        return self._arenas.tensor(buffer, shape, dtype)

    def num_threads(self) -> int:
        return self._threads

    def copy(self, dst: Buffer, src: Buffer, offset_bytes: int, nbytes: int) -> None:
        source = self._arenas.bytes_of(src)[offset_bytes : offset_bytes + nbytes]
        target = self._arenas.bytes_of(dst)[offset_bytes : offset_bytes + nbytes]
        if self._rate.bytes_s is None:
            return kernels.stream_copy(target, source, num_threads=self._threads)
        end_s = self._book(nbytes)
        left_s = end_s - time.monotonic()
        if left_s <= 0:
            kernels.paced_copy(target, source, 0.0, 0.0)
        else:
            kernels.paced_copy(target, source, nbytes / left_s, 0.0)

    def move(self, dst: torch.Tensor, src: torch.Tensor | np.ndarray) -> None:
        source = tensor_of(src) if isinstance(src, np.ndarray) else src
        end_s = self._book(source.numel() * source.element_size())
        dst.copy_(source)
        self._hold(end_s)

    def gather(
        self, dst: torch.Tensor, caches: Sequence[torch.Tensor], tables: torch.Tensor, lengths: torch.Tensor
    ) -> None:
        end_s = self._book(dst.numel() * dst.element_size())
        kernels.kv_gather(caches, tables, lengths, dst)
        self._hold(end_s)

    def host_value(self, source: torch.Tensor) -> np.ndarray:
        end_s = self._book(source.numel() * source.element_size())
        value = source.detach().numpy().copy()
        self._hold(end_s)
        return value

    def resume(self, ready_s: float) -> None:
        """Resume the lane with an op that was ready from `ready_s` on: a link that stood idle until then makes up for
        nothing."""
        if ready_s > self._free_s:
            self._free_s = time.monotonic()

    def pace_compute(self, works: Sequence[Work], started_s: float) -> None:
        """Sleep until the caps allow works to be over that follow each other and started then."""
        least_s = 0.0
        for work in works:
            nbytes = work.host_bytes if self.lane.kind == "cpu" else work.device_bytes
            least_s += self._rate.seconds(work.flops, nbytes, work.link_bytes)
        if least_s > 0:
            self._hold(started_s + least_s)

    def _book(self, nbytes: int) -> float:
        """Reserve the link for `nbytes`; when they must be over."""
        if self._rate.bytes_s is None:
            return 0.0
        now = time.monotonic()
        start_s = self._free_s if now - self._free_s < _CREDIT_S else now
        self._free_s = start_s + nbytes / self._rate.bytes_s
        return self._free_s

    def _hold(self, until_s: float) -> None:
        if until_s > time.monotonic():
            kernels.sleep_until(until_s)
