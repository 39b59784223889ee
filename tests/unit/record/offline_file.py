"""Read what a W&B server would make of an offline run's `.wandb` file: its records applied in their order."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class OfflineRun:
    run: Any = None  # a RunRecord of W&B's
    config: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    steps: dict[str, str] = field(default_factory=dict)  # by the metrics' name or pattern
    artifact_files: list[str] = field(default_factory=list)
    exit_code: int | None = None


def read_offline_file(path: Path) -> OfflineRun:
    """Read a run without the keys that W&B keeps for itself (they begin with an underscore)."""
    found = OfflineRun()
    for record in _records(path.read_bytes()):
        match record.WhichOneof("record_type"):
            case "run":
                found.run = record.run
                _apply(found.config, record.run.config.update)
            case "history":
                found.history.append({})
                _apply(found.history[-1], record.history.item)
            case "summary":
                assert not record.summary.remove
                _apply(found.summary, record.summary.update)
            case "metric":
                found.steps[record.metric.name or record.metric.glob_name] = record.metric.step_metric
            case "artifact":
                found.artifact_files += [entry.path for entry in record.artifact.manifest.contents]
            case "request" if record.request.HasField("log_artifact"):
                found.artifact_files += [e.path for e in record.request.log_artifact.artifact.manifest.contents]
            case "exit":
                found.exit_code = record.exit.exit_code
    return found


def _records(data: bytes) -> Iterator[Any]:
    """Yield the records of a LevelDB log: 32 KiB blocks; checksum, length and kind before each piece of a record."""
    from wandb.proto.wandb_internal_pb2 import Record  # seconds, which collecting all tests need not take

    assert data[:4] == b":W&B"
    position, pieces = 7, b""
    while position + 7 <= len(data):
        if 32768 - position % 32768 < 7:
            position += 32768 - position % 32768
            continue
        length, kind = struct.unpack("<xxxxHB", data[position : position + 7])
        pieces += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a whole record, or its last piece
            yield Record.FromString(pieces)
            pieces = b""


def _apply(values: dict[str, Any], updates: Iterable[Any]) -> None:
    for item in updates:
        *parents, key = [item.key] if item.key else item.nested_key
        place = values
        for parent in parents:
            place = place.setdefault(parent, {})
        if not (parents or [key])[0].startswith("_"):
            place[key] = json.loads(item.value_json)
    values.pop("_wandb", None)
