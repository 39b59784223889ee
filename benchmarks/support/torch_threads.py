"""Run torch as a contestant."""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.support.stopwatch import Stopwatch, stopwatch


def with_threads(run: Callable[[], object], num_threads: int) -> Stopwatch:
    """Time `run` with torch's own threads set to `num_threads`, which are put back after each run."""

    def timed() -> float:
        before = torch.get_num_threads()
        torch.set_num_threads(num_threads)
        try:
            with torch.inference_mode():
                return stopwatch(run)()
        finally:
            torch.set_num_threads(before)

    return timed
