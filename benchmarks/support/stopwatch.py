"""Say how contestants are timed."""

from __future__ import annotations

import time
from collections.abc import Callable

Stopwatch = Callable[[], float]  # runs once and returns its seconds


def stopwatch(run: Callable[[], object]) -> Stopwatch:
    def timed() -> float:
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    return timed
