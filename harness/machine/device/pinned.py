"""Host memory that the device reads and writes by itself: taken near it, filled with pages by many threads, pinned."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import torch

from harness.machine.device.numa import Node
from harness.machine.device.runtime import DeviceError, DeviceRuntime

Progress = Callable[[str], None]

_CHUNK_BYTES = 1 << 28  # pages are taken in pieces of this size, so that progress and limits can be told
_TELL_FROM_BYTES = 4 << 30
_TELL_EVERY_BYTES = 16 << 30
_KEEP_FROM_BYTES = 1 << 30
_SPARE_BYTES = 1 << 29  # left to the system
_PATIENCE_S = 10.0  # a virtual machine's memory may grow when it is used
_POPULATE_WRITE, _PREFERRED = 23, 1  # MADV_POPULATE_WRITE, MPOL_PREFERRED of linux/mman.h and linux/mempolicy.h
_NO_RESERVE = 0x4000  # MAP_NORESERVE of linux/mman.h
_MBIND = {"x86_64": 237, "aarch64": 235}  # numbers of the system call


class PinnedMemoryError(MemoryError):
    """Memory could not be taken or pinned; the text names the limit."""


@contextmanager
def keeping() -> Iterator[None]:
    """Keep large pinned memory that one machine gives back, within the block, for the next one that asks for as much.

    Taking and pinning 100 GB takes a minute. The memory comes with what was in it. Where memory runs short, what waits
    is given up.
    """
    global _kept
    assert _kept is None, "pinned memory is being kept already"
    _kept = []
    try:
        yield
    finally:
        areas, _kept = _kept, None
        for memory, runtime in areas:
            with suppress(DeviceError):  # of a device that has failed, as the run in which it did has told
                runtime.unpin(memory)


_kept: list[tuple[torch.Tensor, DeviceRuntime]] | None = None


class HostMemory:
    """The host's memory for a device. `node`: where to take memory, None: anywhere. `read_limits` gives the limits of
    the moment by name, in bytes that are still free."""

    def __init__(
        self, node: Node | None = None, *, threads: int | None = None, patience_s: float = _PATIENCE_S,
        read_limits: Callable[[], dict[str, int]] | None = None,
    ) -> None:  # fmt: skip
        self._node = node
        self._threads = threads or min(16, os.cpu_count() or 1)
        self._patience_s = patience_s
        self._read_limits = read_limits or free_bytes_by_limit
        self._areas: dict[int, torch.Tensor] = {}  # whole ones, by address

    def pinned(self, nbytes: int, name: str, runtime: DeviceRuntime, tell: Progress) -> torch.Tensor:
        """Return pinned memory, uint8 [nbytes]. Raises PinnedMemoryError naming the limit that does not suffice."""
        area = self._kept_area(nbytes)
        if area is None:
            area = self._new_area(nbytes, name, runtime, tell)
        self._areas[area.data_ptr()] = area
        return area[:nbytes]

    def give_back(self, memory: torch.Tensor, runtime: DeviceRuntime) -> None:
        area = self._areas.pop(memory.data_ptr())
        if _kept is not None and area.nbytes >= _KEEP_FROM_BYTES:
            _kept.append((area, runtime))
        else:
            runtime.unpin(area)

    @staticmethod
    def _kept_area(nbytes: int) -> torch.Tensor | None:
        """Take the smallest kept area that suffices, unless most of it would lie idle."""
        fitting = [entry for entry in _kept or () if nbytes <= entry[0].nbytes <= 1.25 * nbytes]
        if not fitting or _kept is None:
            return None
        best = min(fitting, key=lambda entry: entry[0].nbytes)
        _kept[:] = [entry for entry in _kept if entry[0] is not best[0]]
        return best[0]

    def _new_area(self, nbytes: int, name: str, runtime: DeviceRuntime, tell: Progress) -> torch.Tensor:
        began_s = time.monotonic()
        tell = tell if nbytes >= _TELL_FROM_BYTES else _say_nothing
        area = _mapped(nbytes, name)
        memory = torch.frombuffer(area, dtype=torch.uint8)
        _advise(area, "MADV_HUGEPAGE")
        _advise(area, "MADV_DONTFORK")  # whoever forks has no use for it, and would copy its tables or even pages
        if self._node is not None:
            _prefer_node(memory, self._node.number)
        self._take_pages(memory, name, tell)
        tell(f"{name}: pinning {nbytes / 1e9:.1f} GB")
        try:
            runtime.pin(memory)
        except DeviceError as error:
            limits = ", ".join(f"{limit} {free / 1e9:.4g} GB free" for limit, free in self._read_limits().items())
            raise PinnedMemoryError(f"{_needs(name, nbytes, 'pinned')}: {error}; {_lock_limit()}; {limits}") from error
        tell(f"{name}: {nbytes / 1e9:.1f} GB pinned in {time.monotonic() - began_s:.1f} s")
        return memory

    def _take_pages(self, memory: torch.Tensor, name: str, tell: Progress) -> None:
        """Take as many pieces at a time as the limits leave room for, at least one. Where a virtual machine's memory
        grows when it is used, the next ones find more."""
        starts, at = range(0, memory.nbytes, _CHUNK_BYTES), 0
        told_bytes = 0
        with ThreadPoolExecutor(self._threads) as pool:
            while at < len(starts):
                count = 1
                if memory.nbytes > _CHUNK_BYTES:
                    asked = f"{_needs(name, memory.nbytes, 'pinned')}; after {starts[at] / 1e9:.4g} GB"
                    free_bytes = self._require(min(_CHUNK_BYTES, memory.nbytes - starts[at]), asked)
                    count = max(1, min(self._threads, (free_bytes - _SPARE_BYTES) // _CHUNK_BYTES))
                batch = starts[at : at + count]
                list(pool.map(lambda start: _touch(memory[start : start + _CHUNK_BYTES]), batch))
                at += count
                taken_bytes = min(memory.nbytes, batch[-1] + _CHUNK_BYTES)
                if taken_bytes - told_bytes >= _TELL_EVERY_BYTES:
                    tell(f"{name}: {taken_bytes / 1e9:.0f} of {memory.nbytes / 1e9:.0f} GB taken")
                    told_bytes = taken_bytes

    def require_pageable(self, nbytes: int, name: str) -> None:
        """Require room for pageable memory, which the system gives when it is written to. Raises PinnedMemoryError as
        `pinned` does."""
        if nbytes > _CHUNK_BYTES:
            self._require(nbytes, f"{_needs(name, nbytes, 'host')};")

    def _require(self, wanted: int, asked: str) -> int:
        """Require that much more free memory by every limit; beyond the system's the process would be killed. Return
        what is free."""
        deadline_s = time.monotonic() + self._patience_s
        while True:
            limits = self._read_limits()
            limit, free = min(limits.items(), key=lambda item: item[1], default=("", wanted + _SPARE_BYTES))
            if free >= wanted + _SPARE_BYTES:
                return free
            if _give_up_kept():
                continue
            if time.monotonic() >= deadline_s:
                raise PinnedMemoryError(f"{asked} the limit is {limit}, of which {free / 1e9:.4g} GB are free")
            time.sleep(min(0.2, self._patience_s / 4))


def _needs(name: str, nbytes: int, kind: str) -> str:
    return f"'{name}' needs {nbytes / 1e9:.4g} GB of {kind} memory (hardware.{kind}_memory_gb)"


def _give_up_kept() -> bool:
    """Free the smallest piece of memory that waited for another machine, and tell whether there was one."""
    if not _kept:
        return False
    smallest = min(range(len(_kept)), key=lambda at: _kept[at][0].nbytes)
    memory, runtime = _kept.pop(smallest)
    runtime.unpin(memory)
    return True


def free_bytes_by_limit(root: Path = Path("/")) -> dict[str, int]:
    """Return what the system and the control group of this process still give."""
    limits = {}
    for line in _lines(root / "proc/meminfo"):
        if line.startswith("MemAvailable:"):
            limits["MemAvailable of /proc/meminfo"] = int(line.split()[1]) * 1024
    groups = [line.removeprefix("0::/") for line in _lines(root / "proc/self/cgroup") if line.startswith("0::/")]
    folder = root / "sys/fs/cgroup"
    for path in (*(folder / group for group in groups), folder):
        largest, used = _lines(path / "memory.max"), _lines(path / "memory.current")
        if largest and used and largest[0].isdigit():
            limits["memory.max of the control group"] = int(largest[0]) - int(used[0])
            break
    return limits


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _lock_limit() -> str:
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return "RLIMIT_MEMLOCK: none" if soft == resource.RLIM_INFINITY else f"RLIMIT_MEMLOCK {soft / 1e9:.4g} GB"


def _mapped(nbytes: int, name: str) -> mmap.mmap:
    """Map memory of this process alone (shared memory has no large pages), which nothing stands behind yet.

    The system is not asked to set it aside: it would refuse more than it has, though a virtual machine may grow.
    """
    try:
        return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
    except OSError as error:
        raise PinnedMemoryError(f"{_needs(name, nbytes, 'pinned')}: the system does not map it: {error}") from error


def _advise(area: mmap.mmap, advice: str) -> None:
    """Ask the system to treat memory so. This is a wish: kernels that do not know it say so, and all goes on."""
    try:
        area.madvise(getattr(mmap, advice))
    except (OSError, AttributeError):
        return


def _touch(memory: torch.Tensor) -> None:
    """Give every page memory behind it: by one call of the kernel where it knows that, else by writing to each."""
    libc = ctypes.CDLL(None, use_errno=True)
    address, nbytes = ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(memory.nbytes)
    if libc.madvise(address, nbytes, _POPULATE_WRITE) != 0:
        memory.numpy()[:: mmap.PAGESIZE] = np.uint8(0)


def _prefer_node(memory: torch.Tensor, node: int) -> None:
    """Prefer the node for pages of the mapping while it has any; a page elsewhere is slower, not wrong."""
    number = _MBIND.get(platform.machine())
    if number is None:
        return
    mask = ctypes.c_ulong(1 << node)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall(
        ctypes.c_long(number), ctypes.c_void_p(memory.data_ptr()), ctypes.c_ulong(memory.nbytes),
        ctypes.c_int(_PREFERRED), ctypes.byref(mask), ctypes.c_ulong(8 * ctypes.sizeof(mask)), ctypes.c_uint(0),
    )  # fmt: skip


def _say_nothing(text: str) -> None:
    """Report no progress: small memory comes at once."""
