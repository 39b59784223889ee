"""Small files that are whole or absent, lines that are whole or ignored, and plain data for both."""

from __future__ import annotations

import dataclasses
import errno
import gzip
import json
import math
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from enum import Enum
from pathlib import Path, PurePath
from typing import IO, Any

import yaml

_MAX_BYTES = 16_000_000  # of a file that is read whole; a summary has some ten thousand
_MAX_YAML_BYTES = 100_000  # libyaml takes a second or two for them; a configuration has three thousand
_MAX_YAML_DEPTH = 50
_YAML: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class RecordError(RuntimeError):
    """A record could not be written or read; the message has the file and the cause."""


def plain(value: Any) -> Any:
    """Return a JSON-ready copy: dataclasses and mappings become dicts, paths and enums their text, numpy scalars
    numbers. JSON has no NaN or infinity: they become None. Anything else that JSON cannot hold becomes its text."""
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
    """Open a file that appears under `path` only when the block has ended well. Raises RecordError with the cause."""
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
        file.write(_as_bytes(json.dumps(plain(value), indent=2, ensure_ascii=False, allow_nan=False)))


def read_json(path: Path) -> Any:
    """Read the value that `write_json` wrote. Raises RecordError with the cause, also for a file that the harness did
    not write."""
    return _parsed(path, _MAX_BYTES, lambda text: json.loads(text, parse_constant=_refuse_constant))


def read_json_object(path: Path) -> dict[str, Any]:
    """Read the JSON object in a file. Raises RecordError with the cause, also where the file holds anything else."""
    return _object(path, read_json(path))


def read_yaml_object(path: Path) -> dict[str, Any]:
    """Read the YAML mapping in a file, which may have neither aliases nor deep nesting: a few lines of those fill
    memory. Raises RecordError with the cause."""
    return _object(path, _parsed(path, _MAX_YAML_BYTES, _flat_yaml))


def _parsed(path: Path, max_bytes: int, parse: Callable[[str], Any]) -> Any:
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # reading a pipe or a device may never end
            raise ValueError("it is no regular file")
        if status.st_size > max_bytes:
            raise ValueError(f"it has {status.st_size:,} bytes, and no such file has more than {max_bytes:,}")
        return parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RecordError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        raise RecordError(f"{path}: cannot be read: {' '.join(str(error).split())}") from error


def _object(path: Path, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise RecordError(f"{path}: must hold named values, got {'nothing' if value is None else type(value).__name__}")
    return value


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _flat_yaml(text: str) -> Any:
    """Read events one by one: they show in constant memory what building the document would cost."""
    depth = 0
    for event in yaml.parse(text, Loader=_YAML):
        if isinstance(event, yaml.AliasEvent):
            raise ValueError(f"it has the alias *{event.anchor}, and no record has one")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _MAX_YAML_DEPTH:
            raise ValueError(f"it nests more than {_MAX_YAML_DEPTH} levels")
    return yaml.load(text, Loader=_YAML)


class JsonLines:
    """Append-only lines, each handed to the operating system before `append` returns: a kill loses at most one.

    Where `compressed`, each line is a gzip member of its own. Members one after another are one gzip file, and one that
    a full disk has cut off can be taken back.
    """

    def __init__(self, path: Path, *, compressed: bool = False) -> None:
        """Open or make the file. Raises RecordError with the cause."""
        self.path, self._compressed = path, compressed
        self._fd = -1
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise RecordError(f"{path}: cannot be written: {error.strerror or error}") from error

    def append(self, record: Mapping[str, Any]) -> None:
        """Append a line. Raises RecordError with the cause (a full disk, say); what was written of the line is taken
        back."""
        line = _as_bytes(json.dumps(plain(record), ensure_ascii=False, allow_nan=False, separators=(",", ":")))
        before_bytes = os.fstat(self._fd).st_size
        try:
            _write_all(self._fd, gzip.compress(line, mtime=0) if self._compressed else line)
        except OSError as error:
            with suppress(OSError):  # a reader also copes with half a line; the cause is what counts
                os.ftruncate(self._fd, before_bytes)
            raise RecordError(f"{self.path}: cannot be written: {error.strerror or error}") from error

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read all complete lines; a torn last one (killed, or disk full) is left out. No file gives no lines."""
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


def _as_bytes(text: str) -> bytes:
    """Encode JSON as a line of UTF-8. UTF-8 has no bytes for a lone surrogate, which is escaped as JSON escapes it."""
    return f"{text}\n".encode(errors="backslashreplace")


def _write_all(fd: int, data: bytes) -> None:
    while data:
        written = os.write(fd, data)
        if written == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        data = data[written:]
