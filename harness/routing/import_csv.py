"""Make a routing trace from a CSV file.

    python -m harness.routing.import_csv FILE.csv OUT.jsonl --num-experts 8 --top-k 2

The first line names the columns: `layer` and `expert`, and with them `request` and `position`, or neither, or one of
them. A line is one choice; the k choices of a token in a layer stand in the router's order, in lines of that token that
need not be neighbours. Without `position` each k lines of a layer (of a request) are the next position; without
`request` all lines belong to request 0.
"""

from __future__ import annotations

import csv
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from harness.cli.arguments import CommandParser, whole_number
from harness.config import ConfigError
from harness.interrupts import exit_code
from harness.record.files import RecordError
from harness.routing.trace_file import TraceFileError, TraceHeader, TraceRow, TraceWriter

_NEEDED, _OPTIONAL = ("layer", "expert"), ("request", "position")
Choices = dict[tuple[int, int, int], list[int]]  # (request, layer, position) -> experts


def import_csv(path: Path, out: Path, *, num_experts: int, top_k: int, model: str = "unknown") -> TraceHeader:
    """Write the trace of a CSV file to `out`, which must not exist, and return its header. Raises TraceFileError naming
    file and line, ConfigError for impossible numbers."""
    if not 1 <= top_k <= num_experts:
        raise ConfigError("--top-k", f"must lie between 1 and --num-experts {num_experts}, got {top_k}")
    choices = _choices(path, num_experts, top_k)
    layers = sorted({layer for _, layer, _ in choices})
    if layers != list(range(layers[0], layers[-1] + 1)):
        raise TraceFileError(f"{path}: layers must follow one another without a gap, got {layers}")
    header = TraceHeader(
        model=model, layers=len(layers), first_layer=layers[0], experts=num_experts, k=top_k, source=f"CSV {path.name}"
    )
    rows = list(_rows(path, choices, layers, top_k))
    writer = TraceWriter(out, header)
    try:
        for row in rows:
            writer.write(row)
    finally:
        writer.close()
    return header


def _choices(path: Path, num_experts: int, top_k: int) -> Choices:
    choices: Choices = {}
    places: dict[tuple[int, int], int] = {}  # (request, layer) -> lines so far
    for number, line in _lines(path):
        request, layer = line.get("request", 0), line["layer"]
        nth = places[request, layer] = places.get((request, layer), 0) + 1
        token = (request, layer, line.get("position", (nth - 1) // top_k))
        experts = choices.setdefault(token, [])
        where = f"{path}, line {number}: request {token[0]}, layer {token[1]}, position {token[2]}"
        if line["expert"] >= num_experts:
            raise TraceFileError(f"{where}: 'expert' must lie between 0 and {num_experts - 1}, got {line['expert']}")
        if line["expert"] in experts or len(experts) == top_k:
            raise TraceFileError(f"{where}: must have {top_k} different experts, got {[*experts, line['expert']]}")
        experts.append(line["expert"])
    if not choices:
        raise TraceFileError(f"{path}: has no line after its column names")
    return choices


def _rows(path: Path, choices: Choices, layers: list[int], top_k: int) -> Iterator[TraceRow]:
    """Yield one row for each request."""
    positions: dict[int, set[int]] = {}
    for request, _, position in choices:
        positions.setdefault(request, set()).add(position)
    for request in sorted(positions):
        first, last = min(positions[request]), max(positions[request])
        if len(positions[request]) != last - first + 1:
            gap = min(set(range(first, last)) - positions[request])
            raise TraceFileError(f"{path}: request {request} has no position {gap}, but one before and one after it")
        experts = np.empty((last - first + 1, len(layers), top_k), dtype=np.int16)
        for at, layer in np.ndindex(experts.shape[:2]):
            token = choices.get((request, layers[layer], first + at), [])
            if len(token) != top_k:
                where = f"{path}: request {request}, layer {layers[layer]}, position {first + at}"
                raise TraceFileError(f"{where}: must have {top_k} experts like every layer, got {token}")
            experts[at, layer] = token
        yield TraceRow(request, first, experts)


def _lines(path: Path) -> Iterator[tuple[int, dict[str, int]]]:
    """Yield the number of each line and its columns as numbers."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, skipinitialspace=True)
            names = [name.strip().lower() for name in next(reader, [])]
            _check_names(path, names)
            for cells in reader:
                if cells:  # not an empty line
                    yield reader.line_num, _numbers(path, reader.line_num, names, cells)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise TraceFileError(f"{path}: cannot be read: {error}") from error


def _check_names(path: Path, names: list[str]) -> None:
    known = (*_NEEDED, *_OPTIONAL)
    if not set(_NEEDED) <= set(names) <= set(known) or len(set(names)) != len(names):
        valid = f"must name the columns {' and '.join(_NEEDED)}, and may name {' and '.join(_OPTIONAL)}"
        raise TraceFileError(f"{path}, line 1: {valid}; got {', '.join(names)}")


def _numbers(path: Path, number: int, names: list[str], cells: list[str]) -> dict[str, int]:
    if len(cells) != len(names):
        raise TraceFileError(f"{path}, line {number}: must have {len(names)} columns, got {len(cells)}")
    for name, cell in zip(names, cells, strict=True):
        if not (cell.strip().isascii() and cell.strip().isdecimal()):
            raise TraceFileError(f"{path}, line {number}: '{name}' must be a whole number >= 0, got {cell!r}")
    return {name: int(cell) for name, cell in zip(names, cells, strict=True)}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = CommandParser("harness.routing.import_csv", __doc__)
    parser.add_argument("csv", type=Path, help="the file to read")
    parser.add_argument("out", type=Path, help="the trace to write; must not exist")
    parser.add_argument("--num-experts", type=whole_number(1), required=True, metavar="N", help="experts of a layer")
    parser.add_argument("--top-k", type=whole_number(1), required=True, metavar="N", help="experts of a token")
    parser.add_argument("--model", default="unknown", metavar="NAME", help="whose routing it is, for labels")
    return parser.run(_import, arguments, TraceFileError, RecordError)


def _import(given: Namespace) -> int:
    header = import_csv(given.csv, given.out, num_experts=given.num_experts, top_k=given.top_k, model=given.model)
    print(
        f"{given.out}: {header.layers} layers from layer {header.first_layer}, {header.k} of {header.experts} experts"
    )
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
