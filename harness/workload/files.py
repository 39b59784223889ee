"""Read rows of a local dataset file, one after another. Only .parquet needs a package beyond the standard library.

The readers of `datasets` take seconds to import, and name neither file nor line of what they cannot read.
"""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from harness.config import ConfigError, load_json
from harness.workload.recipe import Row


def file_label(path: str) -> str:
    """Return `name, sha256 <first 16 digits>` of an existing file."""
    file = _existing(path)
    try:
        with file.open("rb") as stream:
            return f"{file.name}, sha256 {hashlib.file_digest(stream, 'sha256').hexdigest()[:16]}"
    except OSError as error:
        raise ConfigError("path", f"cannot read '{path}': {error.strerror}") from error


def file_rows(path: str) -> Iterator[tuple[str, Row]]:
    """Yield (where, row) pairs; `where` says file and line or row, for errors. Raises `ConfigError("path", …)`,
    lazily."""
    file = _existing(path)
    readers = {".jsonl": _jsonl, ".json": _json, ".csv": _csv, ".parquet": _parquet}
    rows = readers[file.suffix.lower()](file)
    try:
        first = next(rows, None)
        if first is None:
            raise ConfigError("path", f"{file.name} is empty; it needs at least one row")
        yield from chain([first], rows)
    except UnicodeDecodeError as error:
        raise ConfigError("path", f"{file.name} is not UTF-8 text: {error.reason}") from error
    except OSError as error:
        raise ConfigError("path", f"cannot read '{path}': {error}") from error


def _existing(path: str) -> Path:
    file = Path(path).expanduser()
    if file.is_dir():
        raise ConfigError("path", f"'{path}' is a folder; name a file in it")
    if not file.exists():
        raise ConfigError("path", f"no such file: '{path}'")
    if not file.is_file():
        raise ConfigError("path", f"'{path}' is no regular file but a device or a pipe")
    return file


def _object(value: Any, where: str) -> Row:
    if not isinstance(value, dict):
        raise ConfigError("path", f"{where} holds a JSON {type(value).__name__}, not an object with columns")
    return value


def _decoded(text: str, where: str, *, num_lines: int = 1) -> Any:
    try:
        return load_json(text)
    except json.JSONDecodeError as error:
        place = f"{where} line {error.lineno}" if num_lines > 1 else where
        raise ConfigError("path", f"{place} is not valid JSON: {error.msg} (column {error.colno})") from error
    except ValueError as error:  # nested too deeply, or a number of thousands of digits
        raise ConfigError("path", f"{where} is not readable JSON: {error}") from error


def _jsonl(file: Path) -> Iterator[tuple[str, Row]]:
    with file.open(encoding="utf-8-sig") as stream:
        for number, line in enumerate(stream, start=1):
            if not line.strip():
                continue
            where = f"{file.name} line {number}"
            yield where, _object(_decoded(line, where), where)


def _json(file: Path) -> Iterator[tuple[str, Row]]:
    text = file.read_text(encoding="utf-8-sig")
    if not text.strip():
        return
    values = _decoded(text, file.name, num_lines=text.count("\n") + 1)
    if not isinstance(values, list):
        raise ConfigError("path", f"{file.name} holds a JSON {type(values).__name__}, not a list of rows")
    for number, value in enumerate(values, start=1):
        where = f"{file.name} row {number}"
        yield where, _object(value, where)


def _csv(file: Path) -> Iterator[tuple[str, Row]]:
    with file.open(encoding="utf-8-sig", newline="") as stream:
        reader = csv.DictReader(stream, restkey="(beyond the header)", strict=True)
        try:
            for number, row in enumerate(reader, start=1):
                yield f"{file.name} row {number}", row
        except csv.Error as error:
            raise ConfigError("path", f"{file.name} line {reader.reader.line_num} is not valid CSV: {error}") from error


def _parquet(file: Path) -> Iterator[tuple[str, Row]]:
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise ConfigError("path", f"reading {file.name} needs pyarrow: pip install datasets") from error
    try:
        batches = parquet.ParquetFile(file).iter_batches(batch_size=256)
        rows = (row for batch in batches for row in batch.to_pylist())
        for number, row in enumerate(rows, start=1):
            yield f"{file.name} row {number}", row
    except (arrow.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError("path", f"{file.name} is not a readable parquet file: {reason}") from error
