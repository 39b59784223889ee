"""Identify the process that writes a run, precisely enough to know later whether that process still lives."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

SILENT_AFTER_S = 3600.0  # a run on another host that has written nothing for so long has ended
_SAME_START_S = 10.0  # two readings of a process's start differ where the clock was set between them


def current_owner() -> dict[str, Any]:
    """Return process, its start, host and boot: a process number alone is reused."""
    started = psutil.Process().create_time()
    return {"pid": os.getpid(), "process_started": started, "host": platform.node(), "boot_id": _boot_id()}


def is_alive(owner: Mapping[str, Any], last_sign_s: float) -> bool:
    """Tell whether that very process still runs.

    A process on another host, or in a container that was one, cannot be seen from here: it counts as alive until its
    last sign of life, in seconds since 1970, is an hour ago.
    """
    if owner.get("host") != platform.node():
        return time.time() - last_sign_s < SILENT_AFTER_S
    if owner.get("boot_id") != _boot_id():
        return False
    try:
        process = psutil.Process(int(owner.get("pid", -1)))
        recorded = float(owner.get("process_started", 0.0))
        return process.status() != psutil.STATUS_ZOMBIE and abs(process.create_time() - recorded) < _SAME_START_S
    except (psutil.NoSuchProcess, ValueError, TypeError):
        return False


def _boot_id() -> str | None:
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else None
