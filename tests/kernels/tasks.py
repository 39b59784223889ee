"""Start other interpreters, and list the threads of this one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 240.0


def python(code: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run `code` in a new interpreter, which finds the packages and what these tests share, with these variables."""
    path = f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'tests/kernels')!r}]\n"
    command = [sys.executable, "-c", path + code]
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env={**os.environ, **environ})


def threads() -> dict[int, str]:
    """Name this process's threads by their ids. One that has been joined may be seen for a moment."""
    names = {}
    for task in Path("/proc/self/task").iterdir():
        try:
            names[int(task.name)] = (task / "comm").read_text().strip()
        except (FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            continue
    return names
