"""Record what produced a run's numbers: the code's version, the software around it, and the machine."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shlex
import subprocess
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import harness

_SOURCE_SUFFIXES = {".py", ".cpp", ".h", ".yaml"}
_CODE = ("--", ".", ":(exclude)results")  # a report that grows does not change what computes it
_PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "datasets", "numpy", "hydra-core", "wandb")


def code_version(root: Path | None = None) -> str:
    """Return the short commit of the checkout, with `+` and a hash of what differs from it.

    Changed and untracked files count, but for those below results/. Where there is no git or no checkout, it is the
    package's version, which does not tell two such runs apart.
    """
    folder = root or Path(harness.__file__).parents[1]
    if not (folder / ".git").exists():
        return f"v{harness.__version__}"
    commit = _git(folder, "rev-parse", "--short=10", "HEAD")
    untracked = _git(folder, "ls-files", "--others", "--exclude-standard", "-z", *_CODE)
    if untracked is None:
        return f"v{harness.__version__}"
    changes = _git(folder, "diff", "--no-ext-diff", "HEAD", *_CODE) if commit else b""
    dirty = hashlib.sha256(changes or b"")
    names = sorted(name for name in untracked.split(b"\0") if name)
    for name in names:
        dirty.update(name + b"\0" + _content(folder / os.fsdecode(name)))
    text = commit.decode().strip() if commit else "uncommitted"
    return f"{text}+{dirty.hexdigest()[:8]}" if changes or names else text


def checkout(root: Path | None = None) -> dict[str, Any]:
    """Return the full commit, and whether anything differs from it; both None where there is no git or no checkout."""
    folder = root or Path(harness.__file__).parents[1]
    commit = _git(folder, "rev-parse", "HEAD") if (folder / ".git").exists() else None
    changed = _git(folder, "status", "--porcelain") if commit else None
    return {"commit": commit.decode().strip() if commit else None, "dirty": None if changed is None else bool(changed)}


def fingerprint(sources: Iterable[str], root: Path | None = None) -> str:
    """Hash the source files below these folders and files, whatever git knows of them: the same code gives the same
    text."""
    folder, digest = root or Path(harness.__file__).parents[1], hashlib.sha256()
    for source in sources:
        place = folder / source
        files = [place] if place.is_file() else sorted(p for p in place.rglob("*") if p.suffix in _SOURCE_SUFFIXES)
        assert files, f"{source}: no source below {folder}"  # it has moved, and would count for nothing
        for path in files:
            digest.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def environment(packages: Iterable[str] = _PACKAGES) -> dict[str, Any]:
    """Return versions of Python and of the packages that are installed, and the machine's processor, cores and
    memory."""
    versions = {name: _version(name) for name in packages}
    return {
        "python": platform.python_version(),
        "packages": {name: version for name, version in versions.items() if version},
        "harness": harness.__version__,
        "system": f"{platform.system()} {platform.release()}",
        "processor": _processor(),
        "num_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    }


def shown_command(program: str, arguments: Iterable[str]) -> str:
    """Write the command for reports as anyone may repeat it in a shell, without the folders of the machine that it ran
    on."""
    shown = ("FOLDER" if Path(argument).is_absolute() else shlex.quote(argument) for argument in arguments)
    return " ".join(("python", program, *shown))


def without_folders(overrides: Iterable[str]) -> list[str]:
    """Return overrides without the folders of the machine, which come before the names of files in their values."""
    return [re.sub(r"(?<=[=:,\[ ])[~/][^,\]]*/", "", override) for override in overrides]


def _git(folder: Path, *arguments: str) -> bytes | None:
    environ = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}  # reading must not disturb a git command of the user's
    try:
        asked = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, timeout=20, env=environ, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return asked.stdout if asked.returncode == 0 else None


def _content(path: Path) -> bytes:
    """Return what tells two states of an untracked file apart; of a large one its size and time, so that this stays
    fast."""
    try:
        status = path.stat()
        return path.read_bytes() if status.st_size < 1_000_000 else f"{status.st_size} {status.st_mtime_ns}".encode()
    except OSError:
        return b"unreadable"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    """Read the processor's name by hand: psutil does not know it, and py-cpuinfo would be a dependency for these
    lines."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
