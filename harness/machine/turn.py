"""Runs that time threads or a GPU of this computer take turns, or know which others ran beside them.

A run that has its turn holds the lock of a file that names it, in a folder that all processes of the computer share.
The system frees the lock of a process that ends, however it ends. Who does not wait leaves its name in the files of all
whom it disturbs.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from uuid import uuid4

from filelock import FileLock, Timeout

LOCKS_VARIABLE = "MOE_HARNESS_LOCKS"
ANYONE = "anyone (its lock file is gone)"  # such as by what clears the folder for temporary files
_POLL_S = 0.2
_FOLDER_MODE, _FILE_MODE = 0o1777, 0o666  # for all users of the computer; each removes its own files only


def locks_folder() -> Path:
    """Return MOE_HARNESS_LOCKS, else a folder of all users below the system's folder for temporary files (TMPDIR,
    /tmp)."""
    return Path(os.environ.get(LOCKS_VARIABLE) or Path(tempfile.gettempdir()) / "moe-offload-harness-locks")


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Turn:
    """A turn is a context manager: within it, `resource` of this computer is this run's own, or the runs beside it are
    known.

    `name` is told to whoever waits. With `exclusive` the block begins when no other run has its turn; without, at once.
    `warning` says why other runs cannot be seen, where that is so; the block is then entered at once.
    """

    def __init__(
        self, resource: str, name: str, *, exclusive: bool = True, tell: Callable[[str], None] = _tell
    ) -> None:
        self.warning: str | None = None
        self._resource, self._exclusive, self._tell = resource, exclusive, tell
        self._name = f"pid {os.getpid()}, {name}"
        self._folder = locks_folder()
        self._path = self._folder / f"{resource}-{os.getpid()}-{uuid4().hex[:8]}.run"
        self._lock = FileLock(self._path, mode=_FILE_MODE)
        self._found: list[str] = []  # who had a turn when this one began

    def __enter__(self) -> Turn:
        told = False
        try:
            if not self._folder.is_dir():
                self._folder.mkdir(parents=True, exist_ok=True)
                self._folder.chmod(_FOLDER_MODE)  # mkdir's own mode is cut by the umask
            while (other := self._begin()) is not None:
                if not told:
                    self._tell(
                        f"waiting for another {self._resource} run ({other}) on this machine; "
                        "exclusive=false runs at once, disturbed"
                    )
                told = True
                time.sleep(_POLL_S)
        except OSError as error:
            self.warning = f"runs beside this one cannot be seen: {self._folder}: {error.strerror or error}"
            self._tell(f"warning: {self.warning}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._lock.is_locked:
            with suppress(OSError):
                self._path.unlink()
            self._lock.release()

    def beside(self) -> list[str]:
        """Name the other runs that had a turn at any time since this one began; `ANYONE` as well, where its lock file
        is gone."""
        if not self._lock.is_locked:
            return []
        left = _lines(self._path)[1:] if self._path.is_file() else [ANYONE]
        return list(dict.fromkeys(self._found + left))

    def _begin(self) -> str | None:
        """Take the turn; or the name of a run to wait for. One process at a time, so that two see each other."""
        with FileLock(self._folder / f"{self._resource}.lock", mode=_FILE_MODE):
            others = self._under_way()
            self._found = [_lines(path)[0] for path in others]
            if others and self._exclusive:
                return self._found[0]
            self._lock.acquire(blocking=False)
            self._path.write_text(f"{self._name}\n")
            for path in others:
                _append(path, self._name)
        return None

    def _under_way(self) -> list[Path]:
        """Return the files of runs that live, and remove what others left."""
        found = []
        for path in sorted(self._folder.glob(f"{self._resource}-*.run")):
            try:
                with FileLock(path, mode=_FILE_MODE).acquire(blocking=False), suppress(OSError):
                    path.unlink()
            except Timeout:
                found.append(path)
        return found


def _lines(path: Path) -> list[str]:
    """Read a run's name, and the names that were left for it. The run may have ended meanwhile."""
    with suppress(OSError):
        return path.read_text().splitlines() or ["unnamed"]
    return ["unnamed"]


def _append(path: Path, line: str) -> None:
    with suppress(FileNotFoundError):  # the run has just ended
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW)
        with os.fdopen(descriptor, "w") as stream:
            stream.write(f"{line}\n")
