"""Time small calls of torch beside a thread that computes in Python, for several switch intervals of the interpreter:

    python benchmarks/switch_intervals.py

Each call gives the interpreter away and has to get it back, as each launch of a GPU's kernel does beside a strategy
that submits. CudaMachine takes its `switch_interval_s` from what this shows.
"""

from __future__ import annotations

import sys
import threading
import time
from statistics import median

import torch

INTERVALS_S = (5e-3, 1e-4, 5e-5, 2e-5, 1e-5, 5e-6)
NUM_CALLS = 25  # of an op with a norm and a rotary embedding in torch
_ROUNDS = 60
_PAUSE_S = 2e-3


def batches_s(interval_s: float | None) -> list[float]:
    """Return the seconds of each batch of calls: alone where no interval is given, else beside the other thread."""
    over = threading.Event()

    def compute() -> None:
        while not over.is_set():
            sum(range(100))

    other, before_s = threading.Thread(target=compute), sys.getswitchinterval()
    sys.setswitchinterval(interval_s or before_s)
    if interval_s is not None:
        other.start()
    numbers, found = torch.zeros(4), []
    try:
        for _ in range(_ROUNDS):
            begun_s = time.perf_counter()
            for _ in range(NUM_CALLS):
                numbers.add_(1.0)
            found.append(time.perf_counter() - begun_s)
            time.sleep(_PAUSE_S)
    finally:
        over.set()
        if interval_s is not None:
            other.join()
        sys.setswitchinterval(before_s)
    return found


def main() -> None:
    torch.set_num_threads(1)
    print(f"{NUM_CALLS} calls alone: {median(batches_s(None)) * 1e3:.2f} ms")
    for interval_s in INTERVALS_S:
        print(
            f"beside a busy thread, interval {interval_s * 1e6:5.0f} us: {median(batches_s(interval_s)) * 1e3:.2f} ms"
        )


if __name__ == "__main__":
    main()
