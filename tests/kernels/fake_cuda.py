"""Builds and steers the fake CUDA runtime of fake_cudart/, so that the mover's CUDA path runs without a GPU."""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch

from kernels import CopyTicket, DataMover

SOURCE = Path(__file__).parent / "fake_cudart" / "fake_cudart.c"
_folder = tempfile.TemporaryDirectory(prefix="fake_cudart_")
NORMAL, URGENT = 0, 1  # the streams of the first mover made after a reset
PACKET = 1000


@functools.cache
def library_path() -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C compiler for the fake CUDA runtime")
    path = Path(_folder.name) / "libcudart.so.12"
    arguments = ["-x", "c", "-O1", "-fPIC", "-shared", "-o", str(path), str(SOURCE), "-lpthread"]
    subprocess.run([compiler, *arguments], check=True)
    return path


class FakeCuda:
    """The library as this process sees it: the same instance that a mover with `cuda_runtime=fake.path` loads."""

    def __init__(self) -> None:
        self.path = str(library_path())
        self.library = ctypes.CDLL(self.path)
        self.library.fake_log.restype = ctypes.c_char_p
        self.library.fake_event.restype = ctypes.c_void_p
        self.library.fake_num_recorded.restype = ctypes.c_long
        self.library.fake_reset()

    def log(self) -> list[str]:
        return self.library.fake_log().decode().splitlines()

    def positions(self, line: str) -> list[int]:
        return [i for i, text in enumerate(self.log()) if text == line]

    def hold(self, on: bool = True) -> None:
        self.library.fake_hold(int(on))

    def permit(self, stream: int, count: int) -> None:
        assert self.library.fake_permit(stream, count), f"stream {stream} never ran {count} copies: {self.log()}"

    def wait_queued(self, stream: int, count: int) -> None:
        assert self.library.fake_wait_queued(stream, count), f"stream {stream} never had {count} copies: {self.log()}"

    def fail(self, function: str, nth: int = 1, code: int = 1) -> None:
        self.library.fake_fail(function.encode(), nth, code)

    def fail_copy(self, nth: int, code: int = 719) -> None:
        self.library.fake_fail_copy(nth, code)

    def event(self) -> int:
        return self.library.fake_event()

    def reach(self, event: int) -> None:
        self.library.fake_reach(ctypes.c_void_p(event))

    def num_recorded(self, event: int) -> int:
        return self.library.fake_num_recorded(ctypes.c_void_p(event))

    def max_queued(self, stream: int) -> int:
        return self.library.fake_max_queued(stream)

    @property
    def num_live(self) -> int:
        return self.library.fake_num_live()


def make(fake: FakeCuda, **changes) -> DataMover:
    """A mover to the fake device, with packets of `PACKET` bytes."""
    return DataMover(**{"device": "cuda:0", "packet_bytes": PACKET, "cuda_runtime": fake.path, **changes})


def submit(mover: DataMover, num_packets: int, **changes) -> tuple[CopyTicket, torch.Tensor, torch.Tensor]:
    """The ticket, destination and source of a request of so many packets."""
    src = torch.randint(1, 256, (num_packets * PACKET,), dtype=torch.uint8)
    dst = torch.zeros_like(src)
    return mover.submit([dst], [src], **changes), dst, src
