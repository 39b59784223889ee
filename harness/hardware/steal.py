"""Processor time that was taken: by the hypervisor for other guests, and by other processes of this machine."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from psutil import NoSuchProcess, Process

_STAT = Path("/proc/stat")
_CLOCK_ERROR_S = 0.03  # of the system's own account, which counts in ticks of 10 ms; what is below it proves nothing


@dataclass(frozen=True)
class CpuTimes:
    """The jiffies of all cores since boot: in all, taken by the hypervisor, and spent by all processes. `own_s` are the
    seconds that this process and its children spent."""

    total: int
    stolen: int
    busy: int
    own_s: float

    def stolen_share_since(self, earlier: CpuTimes) -> float:
        """Return the share of all cores' time between the two readings that was stolen."""
        passed = self.total - earlier.total
        return (self.stolen - earlier.stolen) / passed if passed > 0 else 0.0

    def taken_share_since(self, earlier: CpuTimes) -> float:
        """Return the share of all cores' time that was stolen or that other processes spent, beyond the error of the
        clocks."""
        passed_s = (self.total - earlier.total) / _ticks_a_second()
        others_s = (self.busy - earlier.busy) / _ticks_a_second() - (self.own_s - earlier.own_s)
        stolen_s = (self.stolen - earlier.stolen) / _ticks_a_second()
        return max(0.0, others_s + stolen_s - _CLOCK_ERROR_S) / passed_s if passed_s > 0 else 0.0


def read_cpu_times() -> CpuTimes | None:
    """Read the times now; None where the system does not tell (anything but Linux)."""
    if not _STAT.exists():
        return None
    # "cpu user nice system idle iowait irq softirq steal guest guest_nice"; guest time is part of user time
    values = [int(text) for text in _STAT.read_text().split("\n", 1)[0].split()[1:9]]
    user, nice, system, _, _, irq, softirq, stolen = values
    own = os.times()
    own_s = own.user + own.system + own.children_user + own.children_system + _running_children_s()
    return CpuTimes(sum(values), stolen, user + nice + system + irq + softirq, own_s)


def _running_children_s() -> float:
    spent_s = 0.0
    for child in Process().children(recursive=True):
        with suppress(NoSuchProcess):
            times = child.cpu_times()
            spent_s += times.user + times.system + times.children_user + times.children_system
    return spent_s


def _ticks_a_second() -> int:
    return os.sysconf("SC_CLK_TCK")
