"""Results as a few files of limited size: the tables as they are, run folders in tar.gz volumes."""

from __future__ import annotations

import gzip
import io
import shutil
import tarfile
from pathlib import Path

MAX_FILES = 8
MAX_BYTES = 15 << 20
_LARGE = ("trace.json", "routing.jsonl.gz")  # left out first where a run does not fit


_packed_before: dict[tuple[object, ...], bytes] = {}  # runs that have not changed since: packing is done often


def pack(folder: Path, out: Path) -> list[str]:
    """Pack `folder`/*.json and *.md, and `folder`/runs in volumes, to `out`. Returns a line for each thing left out."""
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("runs-*.tar.gz"):
        old.unlink()
    tables = sorted((*folder.glob("*.json"), *folder.glob("*.md")))
    for path in tables:
        shutil.copyfile(path, out / path.name)
    volumes: list[list[bytes]] = []
    sizes: list[int] = []
    left_out: list[str] = []
    for run in sorted((folder / "runs").glob("*")) if (folder / "runs").is_dir() else []:
        packed = _packed(run)
        if len(packed) > MAX_BYTES:
            packed = _packed(run, without=_LARGE)
            left_out.append(f"{run.name}: {', '.join(_LARGE)}")
        place = next((i for i, size in enumerate(sizes) if size + len(packed) <= MAX_BYTES), None)
        if place is None and (len(volumes) + len(tables) >= MAX_FILES or len(packed) > MAX_BYTES):
            left_out.append(f"{run.name}: all of it")
        elif place is None:
            volumes.append([packed])
            sizes.append(len(packed))
        else:
            volumes[place].append(packed)
            sizes[place] += len(packed)
    for number, members in enumerate(volumes, 1):  # gzip members one after another are one gzip file
        (out / f"runs-{number}.tar.gz").write_bytes(b"".join(members) + _end())
    return left_out


def _packed(run: Path, without: tuple[str, ...] = ()) -> bytes:
    """Pack the folder as a part of a tar file in a gzip member: without the end mark, so that others may follow."""
    paths = [path for path in sorted(run.rglob("*")) if path.is_file() and path.name not in without]
    state = (run, *((path.name, path.stat().st_mtime_ns, path.stat().st_size) for path in paths))
    if state not in _packed_before:
        plain = io.BytesIO()
        with tarfile.open(fileobj=plain, mode="w", format=tarfile.PAX_FORMAT) as tar:
            for path in paths:
                tar.add(path, arcname=f"runs/{path.relative_to(run.parent)}")
            length = tar.offset
        _packed_before[state] = gzip.compress(plain.getvalue()[:length], 6)
    return _packed_before[state]


def _end() -> bytes:
    return gzip.compress(b"\0" * 1024)
