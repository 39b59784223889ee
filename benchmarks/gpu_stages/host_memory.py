"""Take the host's memory once, as a process of its own: a virtual machine's may begin small and grow as it is used.

python -m benchmarks.gpu_stages.host_memory
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.gpu_stages.plan import ROOT, free_host_gb
from harness.cli.arguments import CommandParser
from harness.machine.device.pinned import HostMemory, PinnedMemoryError

_LEFT_BYTES = 10_000_000_000  # to the system
_LONGEST_S = 90.0


class NoDevice:
    """Stands for a device that pins nothing: the memory is only taken."""

    def pin(self, memory: torch.Tensor) -> None:
        """Do nothing."""

    def unpin(self, memory: torch.Tensor) -> None:
        """Do nothing."""


def installed_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def touch(nbytes: int, host: HostMemory | None = None) -> dict[str, Any]:
    """Write to as much memory, or as the limits give, and give it back. Returns what was free before and after."""
    found: dict[str, Any] = {"free_gb_before": free_host_gb(), "wanted_gb": nbytes / 1e9, "stopped": None}
    device: Any = NoDevice()
    host = host or HostMemory(patience_s=3.0)
    try:
        host.give_back(host.pinned(nbytes, "a trial", device, lambda text: print(text, file=sys.stderr)), device)
    except PinnedMemoryError as error:
        found["stopped"] = str(error)
    return found | {"free_gb_after": free_host_gb()}


def touched() -> dict[str, Any]:
    """Take nearly all memory in a process of its own, which may be killed for it; return what that found, if it did."""
    command = [sys.executable, "-m", "benchmarks.gpu_stages.host_memory"]
    try:
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=_LONGEST_S, check=False)
    except subprocess.TimeoutExpired:
        return {"stopped": f"not done within {_LONGEST_S:g} s"}
    if done.returncode:
        return {"stopped": f"the process ended with exit code {done.returncode}"}
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    return CommandParser("benchmarks.gpu_stages.host_memory", __doc__).run(tell_touched, arguments)


def tell_touched(_: Namespace) -> int:
    print(json.dumps(touch(max(1, installed_bytes() - _LEFT_BYTES))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
