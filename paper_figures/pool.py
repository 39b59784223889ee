"""Compute rows that do not depend on each other side by side, one process a core."""

from __future__ import annotations

import gc
import os
import signal
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import cache, partial
from multiprocessing import active_children, forkserver, get_context, parent_process
from multiprocessing.connection import wait
from threading import Thread
from typing import Any, TypeVar

from harness.config import ConfigError
from harness.engine.garbage import collecting_rarely

# Objects made and not gone, before a process searches for those that nobody can reach: behind a row, and within one.
_OBJECTS_OF_ROWS, _OBJECTS = 700_000, 2_000_000
Case = TypeVar("Case", bound=Hashable)
Row = TypeVar("Row")
_begun: dict[tuple[Callable[[Any], Any], Hashable], Future[Any]] = {}  # rows for which nobody has asked yet


def each(row: Callable[[Case], Row], cases: Sequence[Case]) -> Iterator[Row]:
    """Yield `row` of each case, in their order. `row` is a function of a module, and cases can be pickled and hashed.

    There are as many processes as this one may use cores; on one core the rows are computed here. They stay for the
    next rows, and keep what they have imported and read. What a row raises is raised where its turn comes, and then, as
    on Ctrl-C, all processes are ended at once. Raises ConfigError where a process was killed.
    """
    if min(num_cores(), len(cases)) < 2 and not any((row, case) in _begun for case in cases):
        with collecting_rarely(_OBJECTS):
            yield from map(partial(computed, row), cases)
        return
    done = 0
    try:
        _submit(row, cases)
        rows = deque(_begun[row, case] for case in cases)
        for case in cases:
            _begun.pop((row, case), None)
        while rows:
            found = rows.popleft().result()
            done += 1
            yield found
    except BrokenProcessPool:
        raise _killed(f"row {done + 1} of {len(cases)} or one behind it") from None
    finally:
        if done < len(cases):
            end()


def begin(row: Callable[[Case], Row], cases: Sequence[Case]) -> None:
    """Begin with rows behind all that have begun. `each` is to be asked for them, or `end` to be called: this process
    does not end before them. On one core nothing begins. Raises ConfigError where a process was killed."""
    if num_cores() > 1:
        try:
            _submit(row, cases)
        except BrokenProcessPool:
            raise _killed("a row") from None


def end() -> None:
    """End all processes at once, whatever they are at."""
    if _processes.cache_info().currsize:
        _processes().end()


def _submit(row: Callable[[Case], Row], cases: Sequence[Case]) -> None:
    executor = _processes().executor
    for case in cases:
        if (row, case) not in _begun:
            _begun[row, case] = executor.submit(computed, row, case)


def _killed(during: str) -> ConfigError:
    told = f"a process was killed while {during} was computed; is there too little?"
    return ConfigError("memory", f"{told} `taskset -c 0` computes one row at a time")


def computed(row: Callable[[Case], Row], case: Case) -> Row:
    """Return the row. Where it and those before have left much that refers to itself, that is gone then."""
    found = row(case)
    # Made since the last search and not gone, and searches since the last one that looked at everything.
    num_objects, num_searches, _ = gc.get_count()
    if num_objects > _OBJECTS_OF_ROWS or num_searches:
        gc.collect()
    return found


class _Pool:
    """The processes of this one that compute rows."""

    def __init__(self, size: int) -> None:
        context = get_context("forkserver")
        context.set_forkserver_preload(["paper_figures.passes"])
        with _in_environment("OPENBLAS_NUM_THREADS", "1"):  # more wait by spinning, on cores that compute other rows
            forkserver.ensure_running()
        self._others = {child.pid for child in active_children()}
        self.executor = ProcessPoolExecutor(size, mp_context=context, initializer=_begin)

    def end(self) -> None:
        _processes.cache_clear()
        _begun.clear()
        for child in active_children():
            if child.pid not in self._others:
                child.terminate()
        self.executor.shutdown(cancel_futures=True)


@cache
def _processes() -> _Pool:
    return _Pool(num_cores())


@contextmanager
def _in_environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def num_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _begin() -> None:
    """Leave Ctrl-C to the process that waits for the rows, and end with it however it ends. Let Python search for
    unreachable cycles seldom: by its defaults that would take a fifth of the time."""
    gc.freeze()  # what is imported stays
    gc.set_threshold(_OBJECTS, *gc.get_threshold()[1:])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = parent_process()
    assert parent is not None
    Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()


def _end_with(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)
