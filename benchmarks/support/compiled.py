"""Baselines that the machine's own compiler makes from benchmarks/baselines/."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

SOURCES = Path(__file__).resolve().parents[1] / "baselines"
FLAGS = {
    "scalar C++": ("-O3", "-fno-tree-vectorize", "-fno-tree-slp-vectorize"),
    "auto-vectorised C++": ("-O3", "-march=native", "-ffast-math"),
}


def compiler() -> str | None:
    """Return the path of $CXX or of the first usual compiler; None where there is none."""
    for name in (os.environ.get("CXX", ""), "c++", "g++", "clang++"):
        if name and (path := shutil.which(name)):
            return path
    return None


def compiler_version() -> str | None:
    path = compiler()
    if path is None:
        return None
    return subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout.splitlines()[0]


def build(source: str, flags: tuple[str, ...], folder: Path) -> ctypes.CDLL:
    """Build `source` of benchmarks/baselines as a library in `folder`; an error shows what the compiler said."""
    path = compiler()
    assert path is not None, "asked to build without a compiler"
    library = folder / f"{Path(source).stem}-{abs(hash(flags)):x}.so"
    command = [path, "-std=c++17", *flags, "-shared", "-fPIC", "-pthread", str(SOURCES / source), "-o", str(library)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")
    return ctypes.CDLL(str(library))
