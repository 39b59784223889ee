"""The cache folder holds random checkpoints and reference generations, all of which can be made again."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from harness.config import ConfigError

CACHE_VARIABLE = "MOE_HARNESS_CACHE"
ABANDONED_AFTER_S = 3600.0  # a temporary folder this old belongs to a run that was killed
TEMPORARY_PREFIX = ".making-"


def cache_folder() -> Path:
    """Return MOE_HARNESS_CACHE, else a folder below XDG_CACHE_HOME, else one below ~/.cache. The caller that writes
    there makes the folder."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get(CACHE_VARIABLE) or Path(base) / "moe-offload-harness").expanduser()


def make_writable(folder: Path, field: str = CACHE_VARIABLE) -> None:
    """Make `folder` where there is none. Raises ConfigError naming `field` where nothing can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise _unwritable(folder, field, error) from error


def _unwritable(folder: Path, field: str, error: OSError) -> ConfigError:
    return ConfigError(field, f"cannot write to '{folder}' ({error.strerror or error}); name a writable folder")


def make_once(folder: Path, make: Callable[[Path], None]) -> Path:
    """Return `folder`, filled by `make` in a temporary sibling and renamed, so that it exists complete or not at all.

    Of two processes that make it at once, one wins and both see the same content. Raises ConfigError where the folder
    cannot be written, or not completely.
    """
    if folder.is_dir():
        return folder
    make_writable(folder.parent)
    _remove_abandoned(folder.parent)
    temporary = Path(tempfile.mkdtemp(prefix=TEMPORARY_PREFIX, dir=folder.parent))
    try:
        make(temporary)
        _make_readable(temporary)
        temporary.rename(folder)
    except OSError as error:
        if not folder.is_dir():  # another process has not made it first
            raise _unwritable(folder.parent, CACHE_VARIABLE, error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _make_readable(folder: Path) -> None:
    """Let other users read a shared cache: mkdtemp's 0700 and safetensors' 0600 would shut them out."""
    folder.chmod(0o755)
    for path in folder.iterdir():
        path.chmod(0o644)


def _remove_abandoned(parent: Path) -> None:
    for path in parent.glob(f"{TEMPORARY_PREFIX}*"):
        try:
            abandoned = time.time() - path.stat().st_mtime > ABANDONED_AFTER_S
        except FileNotFoundError:  # its owner has just finished
            continue
        if abandoned:
            shutil.rmtree(path, ignore_errors=True)
