"""Read and write, in a folder of small safetensors files, what routers got. docs/routing.md has the format.
Torch-free."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from harness.config import ConfigError, config, load_json, parse, require
from harness.record.files import RecordError, atomic_file

FORMAT, VERSION = "moe-hidden", 1
PART_BYTES = 1_000_000  # of a part at most, where a token is not larger
LARGEST = float(np.finfo(np.float16).max)
_SLACK_BYTES = 512  # by which a part's header may be longer than that of an empty part: its numbers have more digits


class HiddenFileError(ValueError):
    """A folder that holds no recorded inputs of routers: the message has the file and what is valid."""


@config
class HiddenHeader:
    """The header says of which `layers` layers with a router, from layer `first_layer` of the model on, something was
    recorded.

    That is their input of `hidden` numbers, and the `k` of `experts` experts that they chose, for `num_sampled` of the
    `num_tokens` tokens of the workload.
    """

    model: str
    source: str
    layers: int
    hidden: int
    experts: int
    k: int
    num_sampled: int
    num_tokens: int
    seed: int
    first_layer: int = 0

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "experts", "k", "num_tokens"):
            require(getattr(self, name) >= 1, name, f"must be at least 1, got {getattr(self, name)}")

    @property
    def share(self) -> float:
        """The sampled share of the workload's tokens."""
        return self.num_sampled / self.num_tokens

    @property
    def token_bytes(self) -> int:
        """The bytes that a token takes: float16 inputs, int16 experts, and where it stands."""
        return self.layers * (2 * self.hidden + 2 * self.k) + 2 * 8


@dataclass(frozen=True, eq=False)
class Hidden:
    """Recorded tokens are ordered by request and position."""

    header: HiddenHeader
    request_ids: NDArray[np.int64]  # [tokens]
    positions: NDArray[np.int64]  # [tokens]
    inputs: NDArray[np.float16]  # [tokens, layers, hidden]
    experts: NDArray[np.int16]  # [tokens, layers, k], the router's favourite first
    num_clamped: int  # numbers beyond float16's range, recorded as its largest


def read_hidden(folder: Path) -> Hidden:
    """Read what was recorded in `folder`, also while the recording goes on or after it was killed. Raises
    HiddenFileError."""
    paths = sorted(folder.glob("part-*.safetensors"))
    if not paths:
        raise HiddenFileError(f"{folder}: has no part-*.safetensors; a run with record_hidden=true writes them")
    parts = [_read_part(path) for path in paths]
    header = parts[0][0]
    for path, (other, _, _) in zip(paths, parts, strict=True):
        if other != header:
            raise HiddenFileError(f"{path}: is of another recording than {paths[0].name}")
    whole = {name: np.concatenate([arrays[name] for _, arrays, _ in parts]) for name in _shapes(header)}
    order = np.lexsort((whole["position"], whole["request"]))
    found = {name: array[order] for name, array in whole.items()}
    clamped = sum(part[2] for part in parts)
    return Hidden(header, found["request"], found["position"], found["hidden"], found["experts"], clamped)


class HiddenWriter:
    """Writes recorded tokens in parts, each of which appears whole or not at all: a kill costs at most one part.

    Never writes more than `max_tokens(header, limit_bytes)` tokens allow. Raises RecordError where the disk fails.
    """

    def __init__(self, folder: Path, header: HiddenHeader) -> None:
        try:
            folder.mkdir()
        except OSError as error:
            raise RecordError(f"{folder}: cannot be made: {error.strerror or error}") from error
        self._folder, self._header, self._num_parts = folder, header, 0
        self._waiting: list[dict[str, NDArray[Any]]] = []
        self._num_waiting = 0

    def add(self, request: int, positions: NDArray[np.int64], inputs: NDArray[Any], experts: NDArray[np.int16]) -> None:
        """Add tokens of a request; `inputs` is [tokens, layers, hidden], of any kind of floating-point numbers."""
        requests = np.full(len(positions), request, dtype=np.int64)
        arrays = {"request": requests, "position": positions, "hidden": inputs, "experts": experts}
        for name, (shape, _) in _shapes(self._header).items():
            assert arrays[name].shape == (len(positions), *shape), (name, arrays[name].shape)
        self._waiting.append(arrays)
        self._num_waiting += len(positions)
        size = tokens_per_part(self._header)
        while self._num_waiting >= size:
            self._write(size)

    def close(self) -> None:
        """Write what has not filled a part, too."""
        if self._num_waiting:
            self._write(self._num_waiting)

    def _write(self, count: int) -> None:
        whole = {name: np.concatenate([arrays[name] for arrays in self._waiting]) for name in _shapes(self._header)}
        self._waiting = [{name: array[count:] for name, array in whole.items()}]
        self._num_waiting -= count
        path = self._folder / f"part-{self._num_parts:05d}.safetensors"
        self._num_parts += 1
        with atomic_file(path) as file:
            file.write(_packed(self._header, {name: array[:count] for name, array in whole.items()}))


def tokens_per_part(header: HiddenHeader) -> int:
    return max(1, PART_BYTES // header.token_bytes)


def max_tokens(header: HiddenHeader, limit_bytes: int) -> int:
    """Return how many tokens can be recorded in files of `limit_bytes` together, their own headers included."""
    empty = {name: np.zeros((0, *shape), dtype) for name, (shape, dtype) in _shapes(header).items()}
    part_header_bytes = len(_packed(header, empty)) + _SLACK_BYTES
    size = tokens_per_part(header)
    whole_parts, rest_bytes = divmod(limit_bytes, part_header_bytes + size * header.token_bytes)
    return whole_parts * size + max(0, (rest_bytes - part_header_bytes) // header.token_bytes)


def _shapes(header: HiddenHeader) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return shape (without tokens) and dtype of the arrays of a part, by name."""
    return {
        "request": ((), "int64"),
        "position": ((), "int64"),
        "hidden": ((header.layers, header.hidden), "float16"),
        "experts": ((header.layers, header.k), "int16"),
    }


def _packed(header: HiddenHeader, arrays: dict[str, NDArray[Any]]) -> bytes:
    """Return a part. float16 ends at 65504: what lies beyond is recorded as that, and counted."""
    inputs = np.clip(arrays["hidden"], -LARGEST, LARGEST)  # NaN stays NaN
    clamped = int((np.abs(arrays["hidden"]) > LARGEST).sum())
    kept = {**arrays, "hidden": inputs}
    metadata = {"header": json.dumps({"format": FORMAT, "version": VERSION, **asdict(header)}), "clamped": str(clamped)}
    tensors = {name: np.ascontiguousarray(kept[name].astype(dtype)) for name, (_, dtype) in _shapes(header).items()}
    return bytes(save(tensors, metadata=metadata))


def _read_part(path: Path) -> tuple[HiddenHeader, dict[str, NDArray[Any]], int]:
    """Return header, arrays and the number of clamped numbers."""
    try:
        content = path.read_bytes()
        arrays = load(content)
        metadata = _metadata(content)
        header = _header(path, load_json(metadata["header"]))
        clamped = int(metadata["clamped"])
    except OSError as error:
        raise HiddenFileError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, HiddenFileError):
            raise
        raise HiddenFileError(f"{path}: is no part of a recording: {error}") from error
    for name, (shape, dtype) in _shapes(header).items():
        found = arrays.get(name)
        if found is None or found.dtype != dtype or found.shape != (len(arrays["request"]), *shape):
            raise HiddenFileError(f"{path}: '{name}' must be {dtype} {['tokens', *shape]}")
    return header, arrays, clamped


def _metadata(content: bytes) -> dict[str, Any]:
    """Return the metadata in the header of a safetensors file, which begins with the header's length."""
    length = int.from_bytes(content[:8], "little")
    found = load_json(content[8 : 8 + length])["__metadata__"]
    assert isinstance(found, dict)
    return found


def _header(path: Path, content: Any) -> HiddenHeader:
    found = content if isinstance(content, dict) else {}
    if (found.pop("format", None), found.pop("version", None)) != (FORMAT, VERSION):
        raise HiddenFileError(f"{path}: its header must have the format {FORMAT} and the version {VERSION}")
    try:
        return parse(HiddenHeader, found)
    except ConfigError as error:
        raise HiddenFileError(f"{path}: {error}") from None
