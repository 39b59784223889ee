"""Read a checkpoint folder's safetensors files: memory-mapped, checked, and never pickle."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from safetensors import SafetensorError, safe_open

from harness.config import ConfigError, load_json

if TYPE_CHECKING:
    from torch import Tensor

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
FINGERPRINT_SAMPLES = 16  # leading values of each tensor: tells apart checkpoints that differ in their weights only
FLOAT_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}  # safetensors' names


def checkpoint_error(item: str, message: str) -> ConfigError:
    """Return an error about `item`, which is the file or tensor at fault."""
    return ConfigError("model.path", f"{item}: {message}")


def read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise checkpoint_error(str(path), "missing")
    if not path.is_file():
        raise checkpoint_error(str(path), "no regular file")
    try:
        content = load_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise checkpoint_error(str(path), f"not readable as JSON ({error})") from None
    if not isinstance(content, dict):
        raise checkpoint_error(str(path), "must hold a JSON object")
    return content


class TensorHeader(NamedTuple):
    shape: tuple[int, ...]
    dtype: str  # safetensors' name, e.g. "BF16"


class _OpenFile:
    """A mapped safetensors file, which can be read after it is deleted or replaced. Changes written to the file show in
    the mapping, and where the file is cut short a read ends the process (SIGBUS). So `require_unchanged` goes before
    each read; only the time that one copy takes remains unprotected."""

    def __init__(self, path: Path) -> None:
        """Check the header against the file's size. Raises `ConfigError` naming the file."""
        self.path = path
        try:
            self.stat = path.stat()
            self.tensors: Any = safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise checkpoint_error(str(path), f"corrupt or truncated safetensors file ({error})") from None

    def require_unchanged(self) -> None:
        """Raise `ConfigError` where the file is not as it was when it was opened."""
        try:
            now = self.path.stat()
        except OSError:
            return  # its name is gone, the mapping is not
        same_file = (now.st_dev, now.st_ino) == (self.stat.st_dev, self.stat.st_ino)
        if same_file and (now.st_size, now.st_mtime_ns) != (self.stat.st_size, self.stat.st_mtime_ns):
            raise checkpoint_error(str(self.path), "was changed while it was in use; start again when it is whole")


class WeightFiles:
    """A checkpoint's tensors, by name. Data stay in the page cache: `tensor` is a view of the mapped file, not a
    copy."""

    def __init__(self, folder: Path) -> None:
        """Open every file and check its header against its size. Raises `ConfigError` naming the file at fault."""
        self._file_of = _files_by_tensor(folder)
        self._folder = folder
        self._open = {name: _OpenFile(folder / name) for name in sorted(set(self._file_of.values()))}
        self._names = {name: set(file.tensors.keys()) for name, file in self._open.items()}
        if not self._file_of:  # a single file lists its own tensors
            self._open = {SINGLE_FILE: _OpenFile(folder / SINGLE_FILE)}
            self._names = {SINGLE_FILE: set(self._open[SINGLE_FILE].tensors.keys())}
            self._file_of = dict.fromkeys(sorted(self._names[SINGLE_FILE]), SINGLE_FILE)

    def names(self) -> list[str]:
        return sorted(self._file_of)

    def files(self) -> dict[Path, os.stat_result]:
        """Return the status of every file, as it was when it was opened."""
        return {file.path: file.stat for file in self._open.values()}

    def header(self, name: str, dtypes: Collection[str] = FLOAT_DTYPES) -> TensorHeader:
        """Return shape and dtype without touching the data. Raises `ConfigError` if the tensor is absent or of none of
        the dtypes."""
        file = self._file_of.get(name)
        if file is None:
            raise checkpoint_error(name, f"tensor missing from {self._folder}")
        if name not in self._names[file]:
            raise checkpoint_error(name, f"tensor missing from {self._folder / file}, where {INDEX_FILE} places it")
        piece = self._open[file].tensors.get_slice(name)
        if piece.get_dtype() not in dtypes:
            raise checkpoint_error(name, f"dtype must be one of {', '.join(dtypes)}, got {piece.get_dtype()}")
        return TensorHeader(tuple(piece.get_shape()), piece.get_dtype())

    def tensor(self, name: str) -> Tensor:
        file = self._open[self._file_of[name]]
        file.require_unchanged()
        try:
            tensor: Tensor = file.tensors.get_tensor(name)
            return tensor
        except (SafetensorError, OSError) as error:
            raise checkpoint_error(name, f"not readable ({error})") from None

    def samples(self, name: str) -> list[float]:
        """Return a tensor's first values, as they are stored."""
        found: list[float] = self.tensor(name).flatten()[:FINGERPRINT_SAMPLES].double().tolist()
        return found


def _files_by_tensor(folder: Path) -> dict[str, str]:
    """Return the index's weight map, with its files present; empty where one single file holds everything."""
    if not folder.is_dir():
        raise checkpoint_error(str(folder), "no such folder")
    if not (folder / INDEX_FILE).exists():
        if (folder / SINGLE_FILE).exists():
            return {}
        raise checkpoint_error(str(folder), _why_no_weights(folder))
    weight_map = read_json(folder / INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(v, str) for v in weight_map.values()):
        raise checkpoint_error(str(folder / INDEX_FILE), "needs a `weight_map` from tensor names to file names")
    for file in sorted(set(weight_map.values())):
        if Path(file).name != file:
            raise checkpoint_error(str(folder / INDEX_FILE), f"places tensors outside its folder, in {file!r}")
        if not (folder / file).exists():
            raise checkpoint_error(str(folder / file), f"missing, though {INDEX_FILE} places tensors in it")
    return weight_map


def _why_no_weights(folder: Path) -> str:
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLE_SUFFIXES)
    if pickles:
        return f"holds pickle weights only ({pickles[0]}); only safetensors are read, so convert the checkpoint"
    return f"has neither {SINGLE_FILE} nor {INDEX_FILE}"
