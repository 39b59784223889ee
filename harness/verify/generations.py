"""Keep reference generations on disk, made once for each checkpoint, prompt and version of transformers. Torch-free."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

from harness.model.cache import cache_folder


class Generations:
    """One JSON file a prompt, with a checksum over prompt and tokens. A damaged file counts as absent, and one that
    cannot be written is generated again next time: a cache that is full or read-only costs no run."""

    def __init__(self, checkpoint_version: str) -> None:
        versions = f"transformers-{version('transformers')}-torch-{version('torch')}".replace("+", "-")
        self._folder = cache_folder() / "references" / checkpoint_version / versions

    def _path(self, prompt_ids: Sequence[int]) -> Path:
        return self._folder / f"{hashlib.sha256(json.dumps(list(prompt_ids)).encode()).hexdigest()[:24]}.json"

    def get(self, prompt_ids: Sequence[int]) -> list[int] | None:
        try:
            content = json.loads(self._path(prompt_ids).read_text())
            ids: list[int] = content["generated_ids"]
            return ids if content["checksum"] == _checksum(prompt_ids, ids) else None
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None

    def put(self, prompt_ids: Sequence[int], generated_ids: list[int]) -> None:
        path = self._path(prompt_ids)
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        content = {"generated_ids": generated_ids, "checksum": _checksum(prompt_ids, generated_ids)}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps(content))
            temporary.replace(path)
        except OSError:
            with suppress(OSError):
                temporary.unlink()


def _checksum(prompt_ids: Sequence[int], generated_ids: list[int]) -> str:
    return hashlib.sha256(json.dumps([list(prompt_ids), generated_ids]).encode()).hexdigest()[:24]
