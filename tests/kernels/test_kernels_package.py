"""The package's name, its lazy extension, and the choice of code path, most of them in a fresh interpreter."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

import kernels
from kernels._extension import native

ROOT = Path(__file__).resolve().parents[2]


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True
    )


def test_transformers_imports_beside_this_package():
    """It looks for a package of Hugging Face's with the same name. What is here is on the path as for a user."""
    importlib.import_module("transformers.integrations.hub_kernels")
    from transformers import MixtralForCausalLM  # noqa: F401
    from transformers.utils.import_utils import is_kernels_available

    assert not is_kernels_available()
    assert str(ROOT) in sys.path and Path(kernels.__file__) == ROOT / "kernels" / "__init__.py"


def test_import_loads_neither_torch_nor_the_extension():
    result = python("import sys, kernels; print('torch' in sys.modules, 'kernels._native' in sys.modules)")
    assert result.stdout.split() == ["False", "False"], result.stderr


def test_missing_extension_says_how_to_build():
    result = python("import sys; sys.modules['kernels._native'] = None\nimport kernels\nkernels.isa()")
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: kernels: the C++ extension is not built") and "`pip install -e .`" in last


def test_kernels_isa_forces_a_path():
    result = python("import kernels; print(kernels.isa())", KERNELS_ISA="portable")
    assert result.stdout.strip() == "portable", result.stderr


def test_products_of_bfloat16_are_chosen_where_they_gain():
    """The path is the fastest of a processor: bfloat16's products gain on AMD's cores and lose on Intel's."""
    gains = "AuthenticAMD" in Path("/proc/cpuinfo").read_text()
    fastest = next(isa for isa in native().supported_isas() if gains or isa != "avx512bf16")
    result = python("import os; os.environ.pop('KERNELS_ISA', None)\nimport kernels; print(kernels.isa())")
    assert result.stdout.strip() == fastest, result.stderr


@pytest.mark.parametrize("used_before", [False, True])
def test_a_forced_path_gives_way_to_the_environments(used_before):
    code = (
        "import kernels\nfrom kernels._extension import native\n"
        f"if {used_before}: kernels.isa()\n"
        "native().set_isa(native().supported_isas()[0])\n"
        "print(kernels.isa() == native().supported_isas()[0])\n"
        "native().set_isa('')\nprint(kernels.isa())"
    )
    result = python(code, KERNELS_ISA="portable")
    assert result.stdout.split() == ["True", "portable"], result.stderr


def test_unknown_kernels_isa_is_an_error():
    result = python("import kernels; kernels.isa()", KERNELS_ISA="neon")
    last = result.stderr.strip().splitlines()[-1]
    assert last == "ValueError: KERNELS_ISA: expected amx, avx512bf16, avx512, avx2 or portable, got 'neon'"


_PERIOD = {"cpu/a/cpu.cfs_period_us": "100000"}


@pytest.fixture
def with_cores(monkeypatch):
    """Lets the process run on so many cores."""
    return lambda count: monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(count)))


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/", {}, 8),
        ("0::/", {"cpu.max": "max 100000"}, 8),
        ("0::/", {"cpu.max": "250000 100000"}, 3),
        ("0::/", {"cpu.max": "50000 100000"}, 1),
        ("0::/", {"cpu.max": "1600000 100000"}, 8),
        ("0::/a/b", {"a/cpu.max": "400000 100000", "a/b/cpu.max": "max 100000"}, 4),
        ("0::/a/b", {"a/cpu.max": "400000 100000", "a/b/cpu.max": "200000 100000"}, 2),
        ("4:memory:/a\n2:cpu,cpuacct:/a\n0::/", {**_PERIOD, "cpu/a/cpu.cfs_quota_us": "300000"}, 3),
        ("2:cpu,cpuacct:/a", {**_PERIOD, "cpu/a/cpu.cfs_quota_us": "-1"}, 8),
    ],
)  # fmt: skip
def test_num_cores_is_what_the_process_may_use(with_cores, tmp_path, groups, files, expected):
    """Limits are those of the group and of all around it, in the files of both versions of control groups."""
    with_cores(8)
    for name, text in {
        "proc/self/cgroup": groups,
        **{f"sys/fs/cgroup/{name}": text for name, text in files.items()},
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    assert kernels.num_cores(tmp_path) == expected


def test_num_cores_needs_no_control_groups(with_cores, tmp_path):
    with_cores(8)
    assert kernels.num_cores(tmp_path) == 8


def test_unknown_names_are_attribute_errors():
    with pytest.raises(AttributeError, match="no attribute 'no_such_kernel'"):
        _ = kernels.no_such_kernel


def test_every_exported_name_exists():
    for name in kernels.__all__:
        assert getattr(kernels, name)
        assert name in dir(kernels)
