"""Compute rows that do not depend on each other side by side, one process a core."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import TypeVar

Case = TypeVar("Case")
Row = TypeVar("Row")


def each(row: Callable[[Case], Row], cases: Sequence[Case]) -> Iterator[Row]:
    """Yield `row` of each case, in their order. `row` is a function of a module, and cases can be pickled.

    There are as many processes as this one may use cores; on one core the rows are computed here. What a row raises is
    raised where its turn comes, and the cases behind it are given up.
    """
    processes = min(num_cores(), len(cases))
    if processes < 2:
        yield from map(row, cases)
        return
    context = get_context("forkserver")
    context.set_forkserver_preload(["paper_figures.passes"])
    pool = ProcessPoolExecutor(processes, mp_context=context, initializer=_leave_interrupts)
    try:
        yield from pool.map(row, cases)
    finally:
        pool.shutdown(cancel_futures=True)


def num_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _leave_interrupts() -> None:
    """Leave Ctrl-C to the process that waits for the rows."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
