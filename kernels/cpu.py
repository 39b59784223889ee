"""Tell facts about the processor and the calling thread."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

from kernels._extension import native


def isa() -> str:
    """Return the code path in use: "amx", "avx512bf16", "avx512", "avx2" or "portable".

    The environment's KERNELS_ISA forces one. Raises ValueError where KERNELS_ISA names an unknown path or one that this
    processor lacks.
    """
    return native().isa()


def num_cores(root: Path = Path("/")) -> int:
    """Return the number of cores that this process may use. These are the cores that it may run on, or fewer where a
    control group, a container's for example, limits its processor time."""
    quotas = [math.ceil(quota) for folder in _control_groups(root) if (quota := _quota(folder)) is not None]
    return max(1, min([len(os.sched_getaffinity(0)), *quotas]))


def _control_groups(root: Path) -> Iterator[Path]:
    """Yield the folders of this process's groups and of those around them, in either version of control groups. A
    container sees its own group as the topmost one."""
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, group = line.split(":", 2)
        topmost = root / "sys/fs/cgroup" / ("cpu" if "cpu" in controllers.split(",") else "")
        own = topmost / group.lstrip("/")
        yield from (folder for folder in (own, *own.parents) if folder.is_relative_to(topmost))


def _quota(folder: Path) -> float | None:
    """Return how many cores' worth of processor time a group grants; None where it sets no limit."""
    numbers = [part for line in _lines(folder / "cpu.max") for part in line.split()]
    numbers = numbers or [*_lines(folder / "cpu.cfs_quota_us"), *_lines(folder / "cpu.cfs_period_us")]
    return int(numbers[0]) / int(numbers[1]) if len(numbers) == 2 and numbers[0].isdigit() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def thread_cpu_s() -> float:
    """Return the CPU seconds that the calling thread has used."""
    return native().thread_cpu_s()
