"""Threads for the kernels, on cores that the caller chooses."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from kernels._extension import native


class ThreadPool:
    """A pool for the kernels' `pool` argument. Calls with the same pool from several threads take turns.

    cores=[0, 1]:   one thread pinned to each of these cores; the caller only waits
    num_threads=2:  one unpinned thread beside the caller, which does its share

    ValueError for a core this process may not run on; RuntimeError when a thread cannot start, and for every call with
    the pool in a forked child, where its threads do not exist. The threads end with the object.
    """

    def __init__(self, *, num_threads: int | None = None, cores: Sequence[int] | None = None) -> None:
        if (num_threads is None) == (cores is None):
            raise ValueError("num_threads: give either num_threads or cores")
        allowed = os.sched_getaffinity(0)
        if cores is not None and (not cores or not allowed.issuperset(cores) or len(set(cores)) != len(cores)):
            raise ValueError(f"cores: expected distinct cores out of {sorted(allowed)}, got {list(cores)}")
        if num_threads is not None and num_threads < 1:
            raise ValueError(f"num_threads: expected 1 or more, got {num_threads}")
        self.native: Any = native().ThreadPool(num_threads or 1, list(cores or []))

    @property
    def num_threads(self) -> int:
        return self.native.size()

    def cores_in_use(self) -> list[int]:
        """The core on which each thread is running now."""
        return self.native.cores_in_use()


def native_pool(pool: ThreadPool | None, num_threads: int) -> Any:
    """What the extension takes for a kernel's `pool` and `num_threads` arguments, after checking them."""
    if num_threads < 1:
        raise ValueError(f"num_threads: expected 1 or more, got {num_threads}")
    if pool is None:
        return None
    if not isinstance(pool, ThreadPool):
        raise TypeError(f"pool: expected a kernels.ThreadPool, got {type(pool).__name__}")
    return pool.native
