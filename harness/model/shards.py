"""A checkpoint folder's safetensors files: memory-mapped, checked, and never pickle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from safetensors import SafetensorError, safe_open

from harness.config import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
FLOAT_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}  # safetensors' names


def checkpoint_error(item: str, message: str) -> ConfigError:
    """`item` is the file or tensor at fault."""
    return ConfigError("model.path", f"{item}: {message}")


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise checkpoint_error(str(path), "missing") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise checkpoint_error(str(path), f"not readable as JSON ({error})") from None
    if not isinstance(content, dict):
        raise checkpoint_error(str(path), "must hold a JSON object")
    return content


class TensorHeader(NamedTuple):
    shape: tuple[int, ...]
    dtype: str  # safetensors' name, e.g. "BF16"


class Shards:
    """Tensors by name. Data stay in the page cache: `tensor` is a view of the mapped file, not a copy."""

    def __init__(self, folder: Path) -> None:
        """Opens every file and checks its header against its size. Raises `ConfigError` naming the file at fault."""
        self._file_of = _files_by_tensor(folder)
        self._folder = folder
        self._open = {name: _open(folder / name) for name in sorted(set(self._file_of.values()))}
        self._names = {name: set(handle.keys()) for name, handle in self._open.items()}
        if not self._file_of:  # a single file lists its own tensors
            self._open = {SINGLE_FILE: _open(folder / SINGLE_FILE)}
            self._names = {SINGLE_FILE: set(self._open[SINGLE_FILE].keys())}
            self._file_of = dict.fromkeys(sorted(self._names[SINGLE_FILE]), SINGLE_FILE)

    def names(self) -> list[str]:
        return sorted(self._file_of)

    def files(self) -> list[Path]:
        return [self._folder / name for name in self._open]

    def header(self, name: str) -> TensorHeader:
        """Shape and dtype without touching the data. Raises `ConfigError` if the tensor is absent or not of floats."""
        file = self._file_of.get(name)
        if file is None:
            raise checkpoint_error(name, f"tensor missing from {self._folder}")
        if name not in self._names[file]:
            raise checkpoint_error(name, f"tensor missing from {self._folder / file}, where {INDEX_FILE} places it")
        piece = self._open[file].get_slice(name)
        if piece.get_dtype() not in FLOAT_DTYPES:
            raise checkpoint_error(name, f"dtype must be one of {', '.join(FLOAT_DTYPES)}, got {piece.get_dtype()}")
        return TensorHeader(tuple(piece.get_shape()), piece.get_dtype())

    def tensor(self, name: str) -> Tensor:
        try:
            return self._open[self._file_of[name]].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise checkpoint_error(name, f"not readable ({error})") from None


def _files_by_tensor(folder: Path) -> dict[str, str]:
    """The index's weight map, with its files present; empty where one single file holds everything."""
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


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise checkpoint_error(str(path), f"corrupt or truncated safetensors file ({error})") from None
