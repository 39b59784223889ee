"""Facts about the processor and the calling thread."""

from __future__ import annotations

import os

from kernels._extension import native


def isa() -> str:
    """The code path in use: "amx", "avx512bf16", "avx512", "avx2" or "portable".

    The environment's KERNELS_ISA forces one.

    ValueError where KERNELS_ISA names an unknown path or one this processor lacks.
    """
    return native().isa()


def num_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0))


def thread_cpu_s() -> float:
    """CPU seconds the calling thread has used."""
    return native().thread_cpu_s()
