"""Other projects' kernels, each served by a process of its own environment; see benchmarks/peers/."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from benchmarks.support.stopwatch import Stopwatch

ROOT = Path(__file__).resolve().parents[2]


class Shape(Protocol):
    """A shape is what a peer makes its data from."""

    def to_json(self) -> str: ...


class Peer:
    """A process that holds one shape's data and runs its kernels when asked: one line of JSON each way. Its script is
    peers/<name>_<part>.py."""

    def __init__(self, name: str, python: str, part: str, shape: Shape) -> None:
        self.name = name
        # Idle OpenMP threads of a peer must not spin beside the next contestant.
        environ = {**os.environ, "PYTHONPATH": str(ROOT), "KMP_BLOCKTIME": "1"}
        environ.pop("OMP_NUM_THREADS", None)
        openmp = Path(python).absolute().parents[1] / "lib" / "libiomp5.so"
        if openmp.exists():  # what vLLM asks its users to do
            environ["LD_PRELOAD"] = str(openmp)
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed in `close`)
        self._process = subprocess.Popen(
            [python, str(ROOT / "benchmarks" / "peers" / f"{name}_{part}.py")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True, env=environ,
        )  # fmt: skip
        ready = self._ask(shape.to_json())
        self.version: str = ready["version"]
        self.kernels: list[str] = ready["kernels"]

    def _ask(self, line: str) -> dict[str, Any]:
        assert self._process.stdin and self._process.stdout
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it has died: the empty answer below says why
        answer = self._process.stdout.readline()
        if not answer:
            self._process.wait()
            self._errors.seek(0)
            raise RuntimeError(f"{self.name}: its process ended\n{self._errors.read()[-2000:]}")
        return json.loads(answer)

    def stopwatch(self, kernel: str, num_threads: int) -> Stopwatch:
        request = json.dumps({"kernel": kernel, "num_threads": num_threads})
        return lambda: float(self._ask(request)["seconds"])

    def output(self, kernel: str) -> np.ndarray:
        """Return what the kernel's next run gives, as float32: of attention [seqs, heads, head_dim]."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "out.npy"
            self._ask(json.dumps({"kernel": kernel, "num_threads": 1, "output": str(path)}))
            return np.load(path)

    def close(self) -> None:
        self._process.stdin.close()  # type: ignore[union-attr]
        self._process.wait(timeout=60)
        self._process.stdout.close()  # type: ignore[union-attr]
        self._errors.close()
