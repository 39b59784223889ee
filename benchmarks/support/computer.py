"""The computer that a benchmark runs on, as its results tell it."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.support import compiled
from harness.record.provenance import environment
from kernels import isa


@cache
def machine_facts() -> dict[str, Any]:
    """Return what a result says of the machine it was measured on."""
    facts = {"isa": isa(), "compiler": compiled.compiler_version(), **environment(("torch", "numpy"))}
    return {**facts, "processor_model": processor_model(Path("/proc/cpuinfo"))}


def processor_model(cpuinfo: Path) -> str | None:
    """Return family, model and stepping as in "25.17.1": clouds give many generations one name. None where Linux does
    not tell."""
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    entries = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in reversed(lines))}
    numbers = [entries.get(name) for name in ("cpu family", "model", "stepping")]
    return ".".join(number or "?" for number in numbers) if any(numbers) else None
