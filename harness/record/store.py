"""Run folders: what a run was asked, what it is doing, and what came of it, readable at any moment.

    <results_dir>/runs/<run_id>/
        config.yaml  meta.json      what was run, on what; written before anything else
        status.json                 running, ok, oom, failed or interrupted, and who owns the run
        passes.jsonl requests.jsonl one line each, appended as they happen; routing.jsonl.gz too where it is recorded
        hidden/                     what routers got of some tokens, where it is recorded
        summary.json trace.json     at the end

A folder appears with its first three files or not at all. A kill leaves every file readable: whole files are renamed
into place, and half a line at the end of a `.jsonl` is ignored.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml

from harness.config import ConfigError, file_name
from harness.interrupts import word
from harness.record.files import (
    JsonLines,
    RecordError,
    plain,
    read_json,
    read_json_object,
    read_lines,
    read_yaml_object,
    write_json,
)
from harness.record.owner import SILENT_AFTER_S, current_owner, is_alive

STATUSES = ("running", "ok", "oom", "failed", "interrupted")
_NOT_IDENTITY = ("results_dir", "wandb")  # where records go does not change what is run


def run_id(config: Mapping[str, Any], code_version: str, hardware: Any) -> str:
    """Name a run `strategy-model-dataset-machine-xxxxxxxx`: the same resolved config, code and hardware give the same
    name. `hardware` is whatever identifies the machine that runs (a text or a mapping)."""
    asked = {key: value for key, value in config.items() if key not in _NOT_IDENTITY}
    identity = json.dumps(plain([asked, code_version, hardware]), sort_keys=True)
    parts = [_name(config.get(group)) for group in ("strategy", "model", "dataset", "machine")]
    return "-".join([*filter(None, parts), hashlib.sha256(identity.encode()).hexdigest()[:8]])


class RunFolder:
    """The writer's side of one run; one process owns it. Errors of the disk raise RecordError with the cause.

    As a context manager it gives a run that ends without `finish` the status it deserves, then lets the error through.
    """

    def __init__(self, path: Path) -> None:
        """Use `create`."""
        self.path = path
        self._appenders: dict[str, JsonLines] = {}
        self._finished = False

    @classmethod
    def create(
        cls, results_dir: str | os.PathLike[str], run_id: str, config: Mapping[str, Any], meta: Mapping[str, Any]
    ) -> RunFolder:
        """Make the folder and mark it running. Nothing is overwritten: a taken id gets the suffix -2, -3, ...

        Raises ConfigError("results_dir") where nothing can be written.
        """
        runs = Path(results_dir) / "runs"
        try:
            runs.mkdir(parents=True, exist_ok=True)
            _remove_left_overs(runs)
            prepared = Path(tempfile.mkdtemp(prefix=".new-", dir=runs))
            try:
                prepared.chmod(0o755)
                (prepared / "config.yaml").write_text(
                    yaml.safe_dump(plain(config), sort_keys=False, allow_unicode=True), encoding="utf-8"
                )
                write_json(prepared / "status.json", {"status": "running", "started_at": _utc(), **current_owner()})
                return cls(_move_to_free_name(prepared, runs, run_id, meta))
            finally:
                shutil.rmtree(prepared, ignore_errors=True)  # gone already unless something failed
        except (OSError, RecordError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(
                "results_dir", f"cannot write to '{results_dir}' ({reason}); name a writable folder"
            ) from error

    @property
    def run_id(self) -> str:
        return self.path.name

    def append_pass(self, record: Mapping[str, Any]) -> None:
        self._append("passes.jsonl", record)

    def append_request(self, record: Mapping[str, Any]) -> None:
        self._append("requests.jsonl", record)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        write_json(self.path / "summary.json", summary)

    def finish(self, status: str, error: str | None = None) -> None:
        """Record that the run has ended; `error` is the cause in one line where the status is not ok."""
        assert status in STATUSES[1:], f"unknown status {status}"
        self.close()
        path = self.path / "status.json"
        write_json(path, {**read_json(path), "status": status, "finished_at": _utc(), "error": error})
        self._finished = True

    def close(self) -> None:
        for appender in self._appenders.values():
            appender.close()
        self._appenders.clear()

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._finished:
            self.close()
            return
        try:
            if isinstance(error, KeyboardInterrupt):
                self.finish("interrupted", word(error))
            else:
                self.finish("failed", f"{type(error).__name__}: {error}" if error else "ended without a result")
        except RecordError as unrecorded:
            if error is None:
                raise
            error.add_note(f"the run's status could not be recorded either: {unrecorded}")

    def _append(self, name: str, record: Mapping[str, Any]) -> None:
        if name not in self._appenders:
            self._appenders[name] = JsonLines(self.path / name)
        self._appenders[name].append(record)


@dataclass(frozen=True)
class Run:
    """A run as its folder tells it, whatever became of it. Raises RecordError on a file that is damaged."""

    folder: Path

    @property
    def run_id(self) -> str:
        return self.folder.name

    @cached_property
    def config(self) -> dict[str, Any]:
        return read_yaml_object(self.folder / "config.yaml")

    @cached_property
    def meta(self) -> dict[str, Any]:
        return read_json_object(self.folder / "meta.json")

    @cached_property
    def status_record(self) -> dict[str, Any]:
        path = self.folder / "status.json"
        record = read_json_object(path)
        if record.get("status") not in STATUSES:
            raise RecordError(f"{path}: status must be one of {', '.join(STATUSES)}, got {record.get('status')!r}")
        if not isinstance(record.get("pid", -1), int):
            raise RecordError(f"{path}: pid must be a whole number, got {record['pid']!r}")
        return record

    @property
    def status(self) -> str:
        """The status as recorded, except that `running` whose owner is dead reads `interrupted`."""
        return "interrupted" if self._died else str(self.status_record["status"])

    @property
    def error(self) -> str | None:
        """The reason in a line why the run is not ok; for a run that died without a word, when it last wrote
        anything."""
        if not self._died:
            return self.status_record.get("error")
        last = datetime.fromtimestamp(self._last_sign_s, UTC).isoformat(timespec="seconds")
        return f"interrupted: its process on {self.status_record.get('host')} has ended; last sign of life {last}"

    @cached_property
    def _died(self) -> bool:
        return self.status_record["status"] == "running" and not is_alive(self.status_record, self._last_sign_s)

    @property
    def _last_sign_s(self) -> float:
        """The time when a file of the folder was last written to, as passes and requests do."""
        times = [self.folder.stat().st_mtime]
        for path in self.folder.iterdir():
            with suppress(OSError):  # of a file that is being replaced
                times.append(path.stat().st_mtime)
        return max(times)

    @cached_property
    def summary(self) -> dict[str, Any] | None:
        """The summary, or None until the run has written one."""
        path = self.folder / "summary.json"
        return read_json_object(path) if path.exists() else None

    @cached_property
    def passes(self) -> list[dict[str, Any]]:
        return read_lines(self.folder / "passes.jsonl")

    @cached_property
    def requests(self) -> list[dict[str, Any]]:
        return read_lines(self.folder / "requests.jsonl")


def read_run(folder: str | os.PathLike[str]) -> Run:
    """Open a run whose files are read when first asked for. Raises RecordError where the folder is no run folder."""
    run = Run(Path(folder))
    if not (run.folder / "status.json").is_file():
        raise RecordError(f"{run.folder}: not a run folder (it has no status.json)")
    return run


def list_runs(results_dir: str | os.PathLike[str]) -> list[Run]:
    """List all run folders, the oldest first."""
    runs = [
        read_run(path.parent) for path in Path(results_dir).glob("runs/*/status.json") if path.parent.name[0] != "."
    ]
    return sorted(runs, key=lambda run: (str(run.status_record.get("started_at")), run.run_id))


def _remove_left_overs(runs: Path) -> None:
    """Remove files under way of runs that were killed: folders not yet named, and small files not yet renamed."""
    found: list[Path] = []
    with suppress(OSError):  # others make and name their folders at the same time
        found += [*runs.glob(".new-*"), *runs.glob("*/.*.tmp")]
    for path in found:
        folder = path if path.name.startswith(".new-") else path.parent
        try:
            owner = read_json_object(folder / "status.json") if (folder / "status.json").exists() else {}
            last_sign_s = path.stat().st_mtime
            lives = is_alive(owner, last_sign_s) if owner else time.time() - last_sign_s < SILENT_AFTER_S
            if not lives:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        except (OSError, RecordError):
            continue  # its owner has just finished, or it is another user's


def _move_to_free_name(prepared: Path, runs: Path, name: str, meta: Mapping[str, Any]) -> Path:
    """Move the folder to a free name. Each name that is tried goes into meta.json first: a run is to know its own."""
    number = 1
    while True:
        target = runs / (name if number == 1 else f"{name}-{number}")
        if not target.exists():
            write_json(prepared / "meta.json", {"run_id": target.name, **meta})
            try:
                return prepared.rename(target)
            except OSError:
                if not target.exists():  # otherwise another process took the name first
                    raise
        number += 1


def _name(group: Any) -> str:
    """Return the name of a config group for a file name: its `name`, or the group itself."""
    text = str(group.get("name", "") if isinstance(group, Mapping) else group or "")
    return file_name(text)


def _utc() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
