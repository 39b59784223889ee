"""Who writes a run, precisely enough to know later whether that process still lives."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def current_owner() -> dict[str, Any]:
    """Process, its start, host and boot: a process number alone is reused."""
    pid = os.getpid()
    return {"pid": pid, "process_started": _started(pid), "host": platform.node(), "boot_id": _boot_id()}


def is_alive(owner: Mapping[str, Any]) -> bool:
    """Whether that very process still runs. One on another host cannot be seen from here and counts as alive."""
    if owner.get("host") != platform.node():
        return True
    if owner.get("boot_id") != _boot_id():
        return False
    started = _started(int(owner.get("pid", -1)))
    return started is not None and started == owner.get("process_started")


def _boot_id() -> str | None:
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else None


def _started(pid: int) -> str | None:
    """When the process started, in whatever form this system gives; None where there is none, or only its zombie."""
    if Path("/proc/self/stat").exists():
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()  # the name may hold blanks
        except (FileNotFoundError, ProcessLookupError):
            return None
        return None if fields[0] in "ZX" else fields[19]  # clock ticks since boot
    asked = subprocess.run(["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return asked.stdout.strip() or None
