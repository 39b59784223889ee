"""Recorded routing lies in a file of JSON lines: a header and then rows, compressed or not. docs/routing.md has the
format."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from harness.config import ConfigError, config, load_json, parse, require
from harness.record.files import JsonLines

FORMAT = "moe-routing"
VERSIONS = (1, 2)  # 2: rows may have weights
WEIGHT_DIGITS = 4  # behind the point, of weights in a file
_GZIP_MAGIC = b"\x1f\x8b"
_CHUNK_BYTES = 1 << 16  # that are read at a time


class TraceFileError(ValueError):
    """A file that is no routing trace: the message has file, line and what is valid."""


@config
class PredictionHeader:
    """Each row predicts `experts` experts for every layer but the first `distance` ones. The prediction for layer l was
    made when layer l - distance had been computed."""

    distance: int
    experts: int
    source: str

    def __post_init__(self) -> None:
        require(self.distance >= 1, "distance", f"must be at least 1, got {self.distance}")
        require(self.experts >= 1, "experts", f"must be at least 1, got {self.experts}")


@config
class TraceHeader:
    """A trace holds `layers` layers with a router, from layer `first_layer` of the model on; `k` of their `experts`
    work on each token. `weights` says whether rows have the factors that the experts' outputs are multiplied by."""

    model: str
    layers: int
    experts: int
    k: int
    source: str
    first_layer: int = 0
    weights: bool = False
    predictions: PredictionHeader | None = None

    @property
    def version(self) -> int:
        """The oldest version of the format that has what this trace holds, so that older readers read all they can."""
        return 2 if self.weights else 1

    def __post_init__(self) -> None:
        require(self.layers >= 1, "layers", f"must be at least 1, got {self.layers}")
        require(self.first_layer >= 0, "first_layer", f"must be >= 0, got {self.first_layer}")
        require(1 <= self.experts < 2**15, "experts", f"must lie between 1 and 32767, got {self.experts}")
        require(1 <= self.k <= self.experts, "k", f"must lie between 1 and experts {self.experts}, got {self.k}")
        if self.predictions is not None:
            most, distance, asked = self.layers - 1, self.predictions.distance, self.predictions.experts
            require(distance <= most, "predictions.distance", f"must lie between 1 and layers - 1 = {most}")
            require(asked <= self.experts, "predictions.experts", f"must lie between 1 and experts {self.experts}")


@dataclass(frozen=True, eq=False)
class TraceRow:
    """A row holds successive positions of one request. Arrays may be lists where they are written."""

    request: int
    position: int  # position of the first
    experts: NDArray[np.int16]  # [positions, layers, k]
    predicted: NDArray[np.int16] | None = None  # [positions, layers - distance, predicted experts]
    confidence: NDArray[np.float32] | None = None  # the same shape: probability that the expert is chosen
    weights: NDArray[np.float32] | None = None  # [positions, layers, k]


class TraceWriter:
    """Appends rows, each handed to the operating system at once: after a kill all but the last are readable.

    The file is compressed where its name ends in ".gz". Rows are compressed one by one, so a row of a whole request
    takes least.

    Raises TraceFileError where the file exists; RecordError where the disk fails.
    """

    def __init__(self, path: Path, header: TraceHeader) -> None:
        if path.exists():
            raise TraceFileError(f"{path}: exists already; name a new file")
        self.header = header
        content = {key: value for key, value in asdict(header).items() if value is not None and value is not False}
        self._lines = JsonLines(path, compressed=path.suffix == ".gz")
        self._lines.append({"format": FORMAT, "version": header.version, **content})

    def write(self, row: TraceRow) -> None:
        header = self.header
        assert row.experts.shape[1:] == (header.layers, header.k), row.experts.shape
        line: dict[str, Any] = {"request": row.request, "position": row.position, "experts": row.experts}
        if header.weights:
            assert row.weights is not None and row.weights.shape == row.experts.shape, "the header promises weights"
            line["weights"] = np.asarray(row.weights, dtype=np.float64).round(WEIGHT_DIGITS)
        if header.predictions is not None:
            assert row.predicted is not None and row.confidence is not None, "the header promises predictions"
            shape = (len(row.experts), header.layers - header.predictions.distance, header.predictions.experts)
            assert row.predicted.shape == row.confidence.shape == shape, row.predicted.shape
            line |= {"predicted": row.predicted, "confidence": row.confidence}
        self._lines.append(line)

    def close(self) -> None:
        self._lines.close()


def read_header(path: Path) -> TraceHeader:
    """Return the header of a trace. Raises TraceFileError."""
    for _, content in _lines(path):
        return _header(path, content)
    raise TraceFileError(f"{path}: has no complete line; a routing trace begins with its header")


def read_rows(path: Path) -> Iterator[tuple[int, TraceRow]]:
    """Yield (line number, row) of each complete line after the header. Raises TraceFileError."""
    header = read_header(path)
    for number, content in _lines(path):
        if number > 1:
            try:
                yield number, _row(header, content)
            except ValueError as error:
                raise TraceFileError(f"{path}, line {number}: {error}") from None


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the complete lines; half a line at the end was being written when the writer was killed."""
    if path.exists() and not path.is_file():
        raise TraceFileError(f"{path}: no regular file")
    number = 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(_text_lines(file), start=1):
                if not line.endswith(b"\n"):
                    return
                content = _object(line)
                if content is None:
                    raise TraceFileError(f"{path}, line {number}: must be one JSON object, got {_start(line)!r}")
                yield number, content
    except OSError as error:
        raise TraceFileError(f"{path}: cannot be read: {error.strerror or error}") from error
    except zlib.error as error:
        raise TraceFileError(f"{path}, behind line {number}: its compressed data are damaged: {error}") from error


def _text_lines(file: IO[bytes]) -> Iterator[bytes]:
    """Yield the lines of a file, which its content shows to be compressed or not. What is cut off ends in half a
    line, or in none."""
    if file.read(len(_GZIP_MAGIC)) != _GZIP_MAGIC:
        file.seek(0)
        yield from file
        return
    file.seek(0)
    rest: list[bytes] = []
    for text in _decompressed(file):
        *lines, tail = text.split(b"\n")
        for line in lines:
            yield b"".join((*rest, line, b"\n"))
            rest = []
        rest.append(tail)
    if any(rest):
        yield b"".join(rest)


def _decompressed(file: IO[bytes]) -> Iterator[bytes]:
    """Yield the content of a gzip file of one or more members, as far as it goes."""
    member = zlib.decompressobj(zlib.MAX_WBITS | 16)  # which has a header as of gzip
    while packed := file.read(_CHUNK_BYTES):
        while packed:
            yield member.decompress(packed, _CHUNK_BYTES)
            packed = member.unconsumed_tail or member.unused_data
            if member.eof:
                member = zlib.decompressobj(zlib.MAX_WBITS | 16)


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        content = load_json(line)
    except ValueError:
        return None
    return content if isinstance(content, dict) else None


def _start(line: bytes) -> str:
    return line[:40].decode("utf-8", "replace").strip()


def _header(path: Path, content: dict[str, Any]) -> TraceHeader:
    where = f"{path}, line 1"
    found = (content.pop("format", None), content.pop("version", None))
    if found[0] != FORMAT or type(found[1]) is not int or found[1] not in VERSIONS:
        asked = f'the header must have "format": "{FORMAT}" and "version": {" or ".join(map(str, VERSIONS))}'
        raise TraceFileError(f"{where}: {asked}, got {found[0]!r} and {found[1]!r}")
    try:
        header = parse(TraceHeader, content)
    except ConfigError as error:
        raise TraceFileError(f"{where}: {error}") from None
    if header.version > found[1]:
        raise TraceFileError(f'{where}: weights: need "version": {header.version}, got {found[1]}')
    return header


def _row(header: TraceHeader, content: dict[str, Any]) -> TraceRow:
    """Return the row of one line. Raises ValueError without naming the place."""
    names = ["request", "position", "experts", *(["weights"] if header.weights else [])]
    names += ["predicted", "confidence"] if header.predictions else []
    if set(content) != set(names):
        raise ValueError(f"must have exactly the keys {', '.join(names)}; got {', '.join(content)}")
    for name in ("request", "position"):
        if type(content[name]) is not int or not 0 <= content[name] < 2**62:
            raise ValueError(f"'{name}' must be a whole number >= 0, got {content[name]!r}")
    experts = _experts("experts", content["experts"], (header.layers, header.k), header.experts)
    weights = None
    if header.weights:
        weights = _array("weights", content["weights"], (header.layers, header.k), "numbers").astype(np.float32)
        if len(weights) != len(experts):
            raise ValueError(f"'weights' must have as many positions as 'experts', {len(experts)}")
        if not (np.isfinite(weights) & (weights >= 0)).all():
            raise ValueError("'weights' must be finite and >= 0")
    row = TraceRow(content["request"], content["position"], experts, weights=weights)
    if header.predictions is None:
        return row
    shape = (header.layers - header.predictions.distance, header.predictions.experts)
    predicted = _experts("predicted", content["predicted"], shape, header.experts)
    confidence = _array("confidence", content["confidence"], shape, "numbers").astype(np.float32)
    if len(predicted) != len(experts) or len(confidence) != len(experts):
        raise ValueError(f"'predicted' and 'confidence' must have as many positions as 'experts', {len(experts)}")
    if not ((confidence >= 0) & (confidence <= 1)).all():
        raise ValueError("'confidence' must lie between 0 and 1")
    return replace(row, predicted=predicted, confidence=confidence)


def _experts(name: str, value: Any, shape: tuple[int, int], num_experts: int) -> NDArray[np.int16]:
    array = _array(name, value, shape, "whole numbers")
    if array.min() < 0 or array.max() >= num_experts:
        raise ValueError(f"'{name}' must lie between 0 and {num_experts - 1}, got {array.min()} to {array.max()}")
    ordered = np.sort(array, axis=-1)
    if (ordered[..., 1:] == ordered[..., :-1]).any():
        raise ValueError(f"'{name}' must name different experts for a token in a layer")
    return array.astype(np.int16)


def _array(name: str, value: Any, shape: tuple[int, int], kind: str) -> NDArray[Any]:
    asked = f"'{name}' must be {kind} [positions >= 1, {shape[0]} layers, {shape[1]} experts]"
    try:
        array = np.asarray(value)
    except ValueError:  # ragged
        raise ValueError(f"{asked}, got lists of different lengths") from None
    if array.dtype.kind not in ("i" if kind == "whole numbers" else "if"):
        raise ValueError(f"{asked}, got something else than {kind}, or nothing")
    if array.ndim != 3 or array.shape[1:] != shape or not len(array):
        raise ValueError(f"{asked}, got {list(array.shape)}")
    return array
