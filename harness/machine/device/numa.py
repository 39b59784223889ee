"""Find where a PCI device and its nearest memory and cores are, as sysfs tells. Torch-free."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

SYSFS = Path("/sys")


@dataclass(frozen=True)
class Node:
    """A NUMA node and those of its cores on which this process may run."""

    number: int
    cores: tuple[int, ...]


def node_of(pci_bus_id: str | None, sysfs: Path = SYSFS) -> Node | None:
    """Return the device's node; None where there is one node only, or nothing is told (virtual machines say -1)."""
    if pci_bus_id is None or len(_nodes(sysfs)) < 2:
        return None
    number = _number(sysfs / "bus/pci/devices" / pci_bus_id / "numa_node")
    if number is None or number < 0:
        return None
    listed = cores_of((_text(sysfs / f"devices/system/node/node{number}/cpulist") or "").strip())
    allowed = sorted(listed & os.sched_getaffinity(0))
    return Node(number, tuple(allowed)) if allowed else None


def cores_of(text: str) -> set[int]:
    """Parse a list of cores: "0-3,8" -> {0, 1, 2, 3, 8}."""
    cores: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return cores


def _nodes(sysfs: Path) -> list[Path]:
    return sorted((sysfs / "devices/system/node").glob("node[0-9]*"))


def _number(path: Path) -> int | None:
    text = _text(path)
    try:
        return None if text is None else int(text)
    except ValueError:
        return None


def _text(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None
