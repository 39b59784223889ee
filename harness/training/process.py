"""Prepare a process for training, before it imports torch."""

from __future__ import annotations

import ctypes
import os
import sys

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX, _ARENA_MAX = -1, -2, -4, -8  # glibc's mallopt
_GROWTH_BYTES = 256 << 20  # by which the heap grows


def prepare_process() -> None:
    """Keep freed memory and sleeping threads where they are.

    Each step frees and takes the same large tensors: given back to the system, every page of them would be a fault and
    zeroed again. Threads of torch that spin while they wait lose their core to other programs just when they need it.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        kept = {_MMAP_MAX: 0, _TRIM_THRESHOLD: 2**31 - 1, _TOP_PAD: _GROWTH_BYTES, _ARENA_MAX: 1}
        for option, value in kept.items():
            libc.mallopt(option, value)
