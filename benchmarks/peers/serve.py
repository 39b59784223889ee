"""A peer's side of benchmarks/support/peers.py: reads a shape, then runs a kernel for each line it is sent."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

import numpy as np

Shape = TypeVar("Shape")


class Kernel(Protocol):
    def prepare(self, num_threads: int) -> None:
        """Prepare whatever a model does once for all its layers."""

    def run(self) -> None: ...

    def output(self) -> np.ndarray:
        """Return the output of the last run as float32."""


def serve(version: str, read: Callable[[str], Shape], make: Callable[[Shape], Mapping[str, Kernel]]) -> None:
    """Serve the kernels that `make(read(line))` returns by name, until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    kernels = make(read(sys.stdin.readline()))

    def answer(**values: Any) -> None:
        answers.write(json.dumps(values) + "\n")
        answers.flush()

    answer(version=version, kernels=list(kernels))
    for line in sys.stdin:
        request = json.loads(line)
        kernel = kernels[request["kernel"]]
        kernel.prepare(request["num_threads"])
        start = time.perf_counter()
        kernel.run()
        seconds = time.perf_counter() - start
        if "output" in request:
            np.save(request["output"], kernel.output())
        answer(seconds=seconds)
