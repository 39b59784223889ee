"""Processor time that the hypervisor gave to other guests: on a shared machine the largest disturbance of all."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_STAT = Path("/proc/stat")


@dataclass(frozen=True)
class CpuTimes:
    """Jiffies of all cores since boot."""

    total: int
    stolen: int

    def stolen_share_since(self, earlier: CpuTimes) -> float:
        """Share of all cores' time between the two readings that was stolen."""
        passed = self.total - earlier.total
        return (self.stolen - earlier.stolen) / passed if passed > 0 else 0.0


def read_cpu_times() -> CpuTimes | None:
    """Now; None where the system does not tell (anything but Linux)."""
    if not _STAT.exists():
        return None
    # "cpu user nice system idle iowait irq softirq steal guest guest_nice"; guest time is part of user time
    values = [int(text) for text in _STAT.read_text().split("\n", 1)[0].split()[1:9]]
    return CpuTimes(sum(values), values[7])
