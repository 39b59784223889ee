"""Find the runs to compare below the folders given, and read them, with every value checked before it is used."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from harness.record.files import RecordError, plain
from harness.record.store import Run

Value = str | int | float  # of a setting
Number = Annotated[float, Field(allow_inf_nan=False)]
Rate = Annotated[float, Field(ge=0, allow_inf_nan=False)]
GROUPS = ("strategy", "model", "dataset", "machine", "hardware")

_RECORDS = ("status.json", "config.yaml", "meta.json")  # written first; one of them makes a folder a run's
_T = TypeVar("_T")


def printable(value: object) -> str:
    """Make one line without anything that a terminal would obey or could not show."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in " ".join(str(value).split()))


Line = Annotated[str, AfterValidator(printable)]


@dataclass(frozen=True, kw_only=True)
class Percentiles:
    """The percentiles say how a time spreads over requests, in seconds."""

    mean: Rate
    p50: Rate
    p90: Rate
    p99: Rate


@dataclass(frozen=True, kw_only=True)
class Latency:
    """Percentiles over requests; None where no request has such a time."""

    ttft_s: Percentiles | None = None
    tpot_s: Percentiles | None = None
    e2e_s: Percentiles | None = None


@dataclass(frozen=True, kw_only=True)
class Verified:
    """The result of verification: how many requests were compared with the reference, and how many differ."""

    checked: int
    mismatched: int


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The part of `summary.json` that is used; the rest of it is not looked at."""

    label: Literal["measured", "emulated", "simulated", "none"]
    throughput_tok_s: Rate | None
    predicted_throughput_tok_s: Rate | None
    prediction_accuracy: Number | None
    utilization: Mapping[str, Rate]
    verify: Verified
    data_source: Line
    weights_source: Line
    latency: Latency | None = None
    disturbed: Line | None = None


@dataclass(frozen=True)
class _Environment:
    processor: str


@dataclass(frozen=True)
class _Meta:
    code_version: str
    environment: _Environment


@dataclass(frozen=True)
class _Group:
    name: str


@dataclass(frozen=True)
class _Config:
    strategy: _Group
    model: _Group
    dataset: _Group
    machine: _Group
    hardware: _Group


@dataclass(frozen=True, kw_only=True)
class Finished:
    """A run that ended well. `settings` are those of its configuration by dotted name, and its code and computer."""

    run: str
    settings: Mapping[str, Value]
    summary: Summary


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """A run that is no row of the table, and why."""

    run: str
    status: str  # running, oom, failed, interrupted, or damaged
    cause: str


@dataclass(frozen=True, kw_only=True)
class Found:
    """The runs that were found, each list with the oldest first."""

    finished: Sequence[Finished] = field(default_factory=list)
    left_out: Sequence[LeftOut] = field(default_factory=list)


def find(folders: Sequence[Path]) -> Found:
    """Find all runs in and below the folders, each once. Raises RecordError where one of the folders does not exist."""
    finished: list[tuple[str, Finished]] = []
    left_out: list[tuple[str, LeftOut]] = []
    for path in dict.fromkeys(path.resolve() for folder in folders for path in _run_folders(folder)):
        run = Run(path)
        started_at = ""
        try:
            started_at = str(run.status_record.get("started_at"))
            if (status := run.status) == "ok":
                finished.append((started_at, _finished(run)))
            else:
                cause = run.error or ("still under way" if status == "running" else "its process ended without a word")
                left_out.append((started_at, LeftOut(run=printable(path.name), status=status, cause=printable(cause))))
        except RecordError as error:
            cause = str(error).removeprefix(f"{path}{os.sep}")
            left_out.append((started_at, LeftOut(run=printable(path.name), status="damaged", cause=printable(cause))))
    return Found(finished=_in_order(finished), left_out=_in_order(left_out))


def _in_order(runs: list[tuple[str, Any]]) -> list[Any]:
    return [run for _, run in sorted(runs, key=lambda pair: (pair[0], pair[1].run))]


def _run_folders(folder: Path) -> Iterator[Path]:
    """Yield the folder itself if it is a run's, else the run folders below it. Hidden ones are still being made."""
    if not folder.is_dir():
        raise RecordError(f"{folder}: there is no such folder")
    for path, below, _ in os.walk(folder):
        if any(os.path.lexists(os.path.join(path, name)) for name in _RECORDS):
            below.clear()
            yield Path(path)
        below[:] = sorted(name for name in below if not name.startswith("."))


def _finished(run: Run) -> Finished:
    if run.summary is None:
        raise RecordError("summary.json: missing, although the run ended well")
    summary = _checked(Summary, run.summary, "summary.json")
    meta = _checked(_Meta, run.meta, "meta.json")
    config = plain(run.config)
    _checked(_Config, config, "config.yaml")
    settings = dict(leaves(config))
    settings |= {"code": printable(meta.code_version), "computer": printable(meta.environment.processor)}
    return Finished(run=printable(run.folder.name), settings=settings, summary=summary)


def _checked(kind: type[_T], values: Mapping[str, Any], file: str) -> _T:
    try:
        return TypeAdapter(kind).validate_json(json.dumps(values), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        given = "" if first["type"] == "missing" else f", got {first['input']!r:.60}"
        told = "missing" if first["type"] == "missing" else f"must be {first['msg'].removeprefix('Input should be ')}"
        raise RecordError(f"{file}: {place}: {told}{given}") from error


def leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Value]]:
    """Yield (dotted name, value). A rate with its source, {value, kind, source}, counts as its value."""
    for key, value in config.items():
        if isinstance(value, Mapping) and set(value) == {"value", "kind", "source"}:
            value = value["value"]
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{key}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{prefix}{printable(key)}", value
        else:
            yield f"{prefix}{printable(key)}", printable(value if isinstance(value, str) else _as_yaml(value))


def _as_yaml(value: Any) -> str:
    """Write the value as on the command line."""
    return json.dumps(value, default=str)
