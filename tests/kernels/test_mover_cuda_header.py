"""The CUDA functions as the mover declares them against the header of the toolkit, where there is one."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SOURCE = HERE / "cuda_signatures.cpp"


def compiled(tmp_path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("no nvcc")
    arguments = ["-x", "c++", "-std=c++17", f"-I{ROOT / 'kernels/csrc'}", "-c", str(SOURCE), "-o", str(tmp_path / "o")]
    return subprocess.run([nvcc, *arguments, *options], capture_output=True, text=True)


def test_declared_as_the_toolkit_has_them(tmp_path):
    done = compiled(tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("plant", [1, 2, 3])
def test_a_wrong_declaration_does_not_compile(tmp_path, plant):
    done = compiled(tmp_path, f"-DPLANT={plant}")
    assert done.returncode != 0 and "has another signature" in done.stderr


def test_every_function_that_is_loaded_is_checked():
    loaded = re.findall(r'load\("(\w+)", cuda\.(\w+)\)', (ROOT / "kernels/csrc/mover/cuda_runtime.cpp").read_text())
    checked = re.findall(r"^CHECK\((\w+), (\w+)\);$", SOURCE.read_text(), re.MULTILINE)
    assert len(loaded) > 10
    assert {(member, function) for function, member in loaded} == set(checked)
