"""Run the tests that need a GPU, as a process of its own, and keep what it prints."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.gpu_stages.plan import ROOT


def run(out: Path, left_s: float, tests: tuple[str, ...] = ("-m", "cuda")) -> dict[str, Any]:
    """Run `tests`; raises RuntimeError with pytest's last line where any of them failed or they took too long."""
    if find_spec("pytest") is None:
        return {"passed": "none, pytest is not installed"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    path = out / "tests.md"
    with path.open("w") as told:
        try:
            done = subprocess.run(command, cwd=ROOT, stdout=told, stderr=told, timeout=left_s, check=False)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"not at their end within {left_s:.0f} s, see {path.name}") from None
    lines = path.read_text().splitlines() or ["nothing was printed"]
    print(f"   {lines[-1]}", flush=True)
    if done.returncode:
        raise RuntimeError(f"exit code {done.returncode}: {lines[-1]}, see {path.name}")
    return {"passed": lines[-1]}
