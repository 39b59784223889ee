"""Watch for how much of a time the cores were slowed by what no account of processor time shows.

Such are the hypervisor's other guests on the other hyper-thread of a core, and clocks that are turned down. A process
of its own, at the lowest priority, runs a short loop of arithmetic on each core in turn and compares its processor time
with the short ones that it has seen, the shortest twentieth: a core may run faster than usual for a moment. It is a
script of its own and imports nothing of the harness.

    with Watch() as cores:
        before = cores.read()
        ...
        share = cores.read().slowed_share_since(before)
"""

from __future__ import annotations

import os
import sys
import time
from bisect import insort
from dataclasses import dataclass
from mmap import mmap
from pathlib import Path
from struct import Struct
from subprocess import DEVNULL, Popen
from tempfile import NamedTemporaryFile
from types import TracebackType

_COUNTS = Struct("=QQ")  # looks, and those that found a core slowed
_PERIOD_S = 0.03  # each look takes a fifth of a millisecond
_ITERATIONS = 3000
_SLOWED = 1.25  # times a short one: a busy hyper-thread beside costs 1.5 and more, a cache that was emptied 1.1
_SHORT = 20  # one of so many looks is shorter than a short one
_SIBLINGS = Path("/sys/devices/system/cpu/smt/active")


@dataclass(frozen=True)
class Looks:
    """The looks at a core until now, and how many found it slowed."""

    num: int
    num_slowed: int

    def slowed_share_since(self, earlier: Looks) -> float:
        """Return the share of the looks since then that found a core slowed; 0 where there were none."""
        looks = self.num - earlier.num
        return (self.num_slowed - earlier.num_slowed) / looks if looks else 0.0


class Watch:
    """The process that looks, until the block ends or this process does. It finds nothing where hyper-threads of one
    core are both this system's, since a run's own threads slow each other there, and where threads cannot be put on a
    core (anything but Linux)."""

    def __init__(self) -> None:
        self._file = NamedTemporaryFile()  # noqa: SIM115 (closed by the block that this object is)
        self._file.write(_COUNTS.pack(0, 0))
        self._file.flush()
        self._shared = mmap(self._file.fileno(), _COUNTS.size)
        self._process: Popen[bytes] | None = None
        if can_watch():
            arguments = [sys.executable, "-I", __file__, self._file.name, str(os.getpid())]
            self._process = Popen(arguments, stdin=DEVNULL, stdout=DEVNULL, stderr=DEVNULL)

    def read(self) -> Looks:
        return Looks(*_COUNTS.unpack(self._shared))

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._shared.close()
        self._file.close()


def can_watch() -> bool:
    """Tell whether a slowed core would be found, and found slowed by others."""
    siblings = _SIBLINGS.read_text().strip() if _SIBLINGS.exists() else "0"
    return siblings != "1" and hasattr(os, "sched_setaffinity")


def _look(counts: str, parent: int) -> None:
    """Look until the parent has ended."""
    os.nice(19)
    cores = sorted(os.sched_getaffinity(0))
    num_slowed = 0
    looks_s: list[float] = []  # sorted
    with open(counts, "r+b") as file, mmap(file.fileno(), _COUNTS.size) as shared:
        while os.getppid() == parent:
            os.sched_setaffinity(0, {cores[len(looks_s) % len(cores)]})
            _loop_s()  # the next one finds the caches as this one left them
            insort(looks_s, taken_s := _loop_s())
            num_slowed += taken_s > _SLOWED * looks_s[len(looks_s) // _SHORT]
            shared[:] = _COUNTS.pack(len(looks_s), num_slowed)
            time.sleep(_PERIOD_S)


def _loop_s() -> float:
    began_s = time.thread_time()
    total = 0
    for number in range(_ITERATIONS):
        total += number * number
    return time.thread_time() - began_s


if __name__ == "__main__":
    _look(sys.argv[1], int(sys.argv[2]))
