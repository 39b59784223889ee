"""Tell facts about the processor and the calling thread."""

from __future__ import annotations

import os

from kernels._extension import native


def isa() -> str:
    """Return the code path in use: "amx", "avx512bf16", "avx512", "avx2" or "portable".

    The environment's KERNELS_ISA forces one. Raises ValueError where KERNELS_ISA names an unknown path or one that this
    processor lacks.
    """
    return native().isa()


def num_cores() -> int:
    """Return the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def thread_cpu_s() -> float:
    """Return the CPU seconds that the calling thread has used."""
    return native().thread_cpu_s()
