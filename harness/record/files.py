"""Small files that are whole or absent, lines that are whole or ignored, and plain data for both."""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from enum import Enum
from pathlib import Path, PurePath
from typing import IO, Any


class RecordError(RuntimeError):
    """A record could not be written or read; the message has the file and the cause."""


def plain(value: Any) -> Any:
    """JSON-ready copy: dataclasses and mappings become dicts, paths and enums their text, numpy scalars numbers.

    JSON has no NaN or infinity: they become None. Anything else that JSON cannot hold becomes its text.
    """
    if isinstance(value, Enum):
        return plain(value.value)
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(plain(key)): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted((plain(item) for item in value), key=str)
    if isinstance(value, PurePath):
        return str(value)
    if hasattr(value, "tolist"):  # numpy scalars and arrays, without importing numpy here
        return plain(value.tolist())
    return str(value)


@contextmanager
def atomic_file(path: Path) -> Iterator[IO[bytes]]:
    """A file that appears under `path` only when the block has ended well. Raises RecordError with the cause."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise RecordError(f"{path}: cannot be written: {error.strerror or error}") from error
    finally:
        with suppress(OSError):  # renamed already, or never made; what went wrong is on its way up
            temporary.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    with atomic_file(path) as file:
        file.write((json.dumps(plain(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode())


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RecordError(f"{path}: cannot be read: {error}") from error


class JsonLines:
    """Append-only lines, each handed to the operating system before `append` returns: a kill loses at most one."""

    def __init__(self, path: Path) -> None:
        """Opens or makes the file. Raises RecordError with the cause."""
        self.path = path
        self._fd = -1
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise RecordError(f"{path}: cannot be written: {error.strerror or error}") from error

    def append(self, record: Mapping[str, Any]) -> None:
        """Raises RecordError with the cause (a full disk, say); what was written of the line is taken back."""
        line = (json.dumps(plain(record), ensure_ascii=False, allow_nan=False, separators=(",", ":")) + "\n").encode()
        before_bytes = os.fstat(self._fd).st_size
        try:
            _write_all(self._fd, line)
        except OSError as error:
            with suppress(OSError):  # a reader also copes with half a line; the cause is what counts
                os.ftruncate(self._fd, before_bytes)
            raise RecordError(f"{self.path}: cannot be written: {error.strerror or error}") from error

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def read_lines(path: Path) -> list[dict[str, Any]]:
    """All complete lines; a torn last one (killed, or disk full) is left out. No file, no lines."""
    try:
        *lines, tail = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RecordError(f"{path}: cannot be read: {error}") from error
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(json.loads(line))
        except ValueError as error:
            raise RecordError(f"{path}: line {number} is corrupt: {error}") from error
    assert isinstance(tail, bytes)  # empty after a whole last line, else the torn piece
    return records


def _write_all(fd: int, data: bytes) -> None:
    while data:
        written = os.write(fd, data)
        if written == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        data = data[written:]
