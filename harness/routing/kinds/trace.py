"""Replay routing, and predictions of it, from a recorded trace."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from harness.config import ConfigError, config, require
from harness.routing.base import RoutedModel, Routing
from harness.routing.predictors import RoutingConfig, no_experts
from harness.routing.trace_file import TraceFileError, TraceHeader, TraceRow, read_header, read_rows


@config
class Config(RoutingConfig):
    """`path` names a recorded trace; without it no routing can be built."""

    path: str | None = None


@dataclass(frozen=True, eq=False)
class Recorded:
    """A trace holds all its rows, request after request in the order of their ids."""

    header: TraceHeader
    request_ids: NDArray[np.int64]  # [requests], ascending
    first_positions: NDArray[np.int64]  # [requests]
    starts: NDArray[np.int64]  # [requests + 1], rows of each request in the arrays below
    experts: NDArray[np.int16]  # [rows, layers, k]
    predicted: NDArray[np.int16] | None  # [rows, layers - distance, predicted experts]
    confidence: NDArray[np.float32] | None

    def find(
        self, request_ids: NDArray[np.int64], positions: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return the row of each token, and whether it stands in for a token that was not recorded. Requests that were
        not recorded repeat the recorded ones in turn; a position that was not recorded wraps around within its request.
        """
        request_ids, positions = np.asarray(request_ids), np.asarray(positions)
        near = np.minimum(np.searchsorted(self.request_ids, request_ids), len(self.request_ids) - 1)
        known = self.request_ids[near] == request_ids
        which = np.where(known, near, request_ids % len(self.request_ids))
        lengths = self.starts[which + 1] - self.starts[which]
        offsets = positions - self.first_positions[which]
        repeats = ~known | (offsets < 0) | (offsets >= lengths)
        return self.starts[which] + offsets % lengths, repeats


class TracePredictor:
    """A trace's own predictions. A prediction that was made earlier than asked for is still known; the first layers
    have none."""

    def __init__(self, recorded: Recorded, column: dict[int, int]) -> None:
        assert recorded.header.predictions is not None
        self._recorded, self._column = recorded, column  # by layer
        self._distance = recorded.header.predictions.distance
        self.source = f"recorded: {recorded.header.predictions.source}"

    def experts(
        self, request_ids: NDArray[np.int64], positions: NDArray[np.int64], layer: int, distance: int = 1
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        recorded = self._recorded
        assert recorded.predicted is not None and recorded.confidence is not None
        column = self._column[layer] - self._distance
        if column < 0 or distance > self._distance:
            return no_experts(len(request_ids))
        rows, _ = recorded.find(request_ids, positions)
        return recorded.predicted[rows, column].astype(np.int64), recorded.confidence[rows, column].astype(np.float64)


class TraceRouting:
    """A routing that a trace recorded; its `predictions` is None where the trace carries none."""

    is_even = False

    def __init__(self, recorded: Recorded, name: str, layers: tuple[int, ...]) -> None:
        count, header = len(recorded.request_ids), recorded.header
        self.source = (
            f"recorded: {name} ({header.source}; model {header.model}), {count} requests; "
            "requests and positions beyond them repeat it"
        )
        self._column = {layer: column for column, layer in enumerate(layers)}
        self.predictions = TracePredictor(recorded, self._column) if header.predictions is not None else None
        self._recorded = recorded

    def experts(self, request_ids: NDArray[np.int64], positions: NDArray[np.int64], layer: int) -> NDArray[np.int64]:
        assert layer in self._column, "a dense layer has no routing"
        rows, _ = self._recorded.find(request_ids, positions)
        return self._recorded.experts[rows, self._column[layer]].astype(np.int64)

    def repeats(self, request_ids: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Tell for each token [tokens] whether the trace repeats itself for it, so that results can say how many
        did."""
        return self._recorded.find(request_ids, positions)[1]


def read_trace(path: Path) -> Recorded:
    """Read a trace whose rows are in any order; each request's positions must follow one another without a gap. Raises
    TraceFileError."""
    header = read_header(path)
    rows: dict[int, list[tuple[int, TraceRow]]] = {}
    for number, row in read_rows(path):
        rows.setdefault(row.request, []).append((number, row))
    if not rows:
        raise TraceFileError(f"{path}: has a header and no complete row")
    ordered = {request: _in_order(path, rows[request]) for request in sorted(rows)}
    parts = [row for request_rows in ordered.values() for row in request_rows]
    lengths = [sum(len(row.experts) for row in request_rows) for request_rows in ordered.values()]
    predicted = [row.predicted for row in parts if row.predicted is not None]
    confidence = [row.confidence for row in parts if row.confidence is not None]
    return Recorded(
        header=header,
        request_ids=np.array(list(ordered), dtype=np.int64),
        first_positions=np.array([request_rows[0].position for request_rows in ordered.values()], dtype=np.int64),
        starts=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        experts=np.concatenate([row.experts for row in parts]),
        predicted=np.concatenate(predicted) if predicted else None,
        confidence=np.concatenate(confidence) if confidence else None,
    )


def _in_order(path: Path, rows: list[tuple[int, TraceRow]]) -> list[TraceRow]:
    rows = sorted(rows, key=lambda numbered: numbered[1].position)
    expected = rows[0][1].position
    for number, row in rows:
        if row.position != expected:
            problem = "was recorded already" if row.position < expected else f"does not follow position {expected - 1}"
            raise TraceFileError(f"{path}, line {number}: position {row.position} of request {row.request} {problem}")
        expected += len(row.experts)
    return [row for _, row in rows]


def build(settings: Config, model: RoutedModel, seed: int) -> Routing:
    """Build the routing of a trace. The seed changes nothing."""
    if settings.path is None:
        raise ConfigError("path", "missing; name a recorded trace (JSON lines, see docs/routing.md)")
    path = Path(settings.path)
    try:
        recorded = read_trace(path)
    except TraceFileError as error:
        raise ConfigError("path", str(error)) from None
    header, layers = recorded.header, model.moe_layers
    for name, found, needed in (
        ("first_layer", header.first_layer, layers[0]),
        ("layers", header.layers, len(layers)),
        ("experts", header.experts, model.num_experts),
        ("k", header.k, model.experts_per_token),
    ):
        told = f"{path}, line 1: '{name}' must be {needed} for this model, got {found} (recorded from {header.model})"
        require(found == needed, "path", told)
    return TraceRouting(recorded, path.name, layers)
