"""Replay routing, and predictions of it, from a recorded trace, also in a model with more or fewer layers.

The model's layers with a router are cut into blocks, each as long as the trace. A block takes the trace's layers in
their order, so that within it a layer follows the one before as recorded. Block b takes them of the request that
comes b places behind the token's own, so blocks are independent of one another. A shorter model takes the first layers.
"""

from __future__ import annotations

from collections.abc import Callable
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
    weights: NDArray[np.float32] | None  # as `experts`

    def find(
        self, request_ids: NDArray[np.int64], positions: NDArray[np.int64], block: int = 0, num_blocks: int = 1
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return the row of each token in a block of layers, and whether the token itself was not recorded.

        Requests that were not recorded repeat the recorded ones in turn; a position that was not recorded wraps around
        within its request. Each further block has the next request and, once all have had their turn, positions as far
        apart as can be. So a token has another row in each block.
        """
        positions, count = np.asarray(positions), len(self.request_ids)
        places, known = self.places(np.asarray(request_ids))
        which = (places + block) % count
        lengths = self.starts[which + 1] - self.starts[which]
        offsets = positions - self.first_positions[which] + block // count * (lengths // self._num_turns(num_blocks))
        repeats = ~known | (offsets < 0) | (offsets >= lengths)
        return self.starts[which] + offsets % lengths, repeats

    def places(self, request_ids: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return the place of the recorded request that each request repeats, and whether it was itself recorded.

        Negative numbers, which prompts of a profile run have, repeat the last ones first.
        """
        count = len(self.request_ids)
        near = np.minimum(np.searchsorted(self.request_ids, request_ids), count - 1)
        known = self.request_ids[near] == request_ids
        return np.where(known, near, request_ids % count), known

    def holds(self, num_blocks: int) -> bool:
        """Tell whether a token can have another row in each of so many blocks."""
        return self._num_turns(num_blocks) <= int(np.diff(self.starts).min())

    def _num_turns(self, num_blocks: int) -> int:
        """Return how often the requests are gone through for all blocks."""
        return -(-num_blocks // len(self.request_ids))


@dataclass(frozen=True)
class Places:
    """The place in the trace of each of a model's layers with a router."""

    blocks: dict[int, tuple[int, int]]  # by layer: its block, and its place among the trace's layers
    num_blocks: int
    told: str  # of the mapping, for labels; empty where each layer has its own

    @classmethod
    def of(cls, header: TraceHeader, layers: tuple[int, ...]) -> Places:
        """Place `layers`, the model's layers with a router."""
        needed, found = len(layers), header.layers
        num_blocks = -(-needed // found)
        told = ""
        if needed < found:
            told = f"; the first {needed} of its {found} layers"
        elif needed > found:
            told = f"; its {found} layers stand for {needed}, in {num_blocks} blocks of different requests"
        if header.first_layer != layers[0]:
            told += f"; its layer {header.first_layer} stands for layer {layers[0]}"
        return cls({layer: divmod(index, found) for index, layer in enumerate(layers)}, num_blocks, told)


class TracePredictor:
    """A trace's own predictions. A prediction that was made earlier than asked for is still known; the first layers of
    a block have none."""

    def __init__(self, recorded: Recorded, places: Places) -> None:
        assert recorded.header.predictions is not None
        self._recorded, self._places = recorded, places
        self._distance = recorded.header.predictions.distance
        self.source = f"recorded: {recorded.header.predictions.source}"

    def experts(
        self,
        request_ids: NDArray[np.int64],
        positions: NDArray[np.int64],
        layer: int,
        distance: int = 1,
        chosen: Callable[[], NDArray[np.int64]] | None = None,
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        recorded, (block, place) = self._recorded, self._places.blocks[layer]
        assert recorded.predicted is not None and recorded.confidence is not None
        column = place - self._distance
        if column < 0 or distance > self._distance:
            return no_experts(len(request_ids))
        rows, _ = recorded.find(request_ids, positions, block, self._places.num_blocks)
        return recorded.predicted[rows, column].astype(np.int64), recorded.confidence[rows, column].astype(np.float64)


class TraceRouting:
    """A routing that a trace recorded; its `predictions` is None where the trace carries none."""

    is_even = False

    def __init__(self, recorded: Recorded, name: str, layers: tuple[int, ...]) -> None:
        count, header = len(recorded.request_ids), recorded.header
        self._recorded, self._places = recorded, Places.of(header, layers)
        self.source = (
            f"recorded: {name} ({header.source}; model {header.model}), {count} requests; "
            f"requests and positions beyond them repeat it{self._places.told}"
        )
        self.predictions = TracePredictor(recorded, self._places) if header.predictions is not None else None

    def experts(self, request_ids: NDArray[np.int64], positions: NDArray[np.int64], layer: int) -> NDArray[np.int64]:
        assert layer in self._places.blocks, "a dense layer has no routing"
        block, place = self._places.blocks[layer]
        rows, _ = self._recorded.find(request_ids, positions, block, self._places.num_blocks)
        return self._recorded.experts[rows, place].astype(np.int64)

    def num_shared(self, request_ids: NDArray[np.int64], others: NDArray[np.int64]) -> int:
        """Return how many of the requests have the routing of one of the others."""
        places = self._recorded.places
        return int(np.isin(places(request_ids)[0], places(others)[0]).sum())

    def tokens(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the requests and positions of all recorded tokens, each [tokens]."""
        recorded, lengths = self._recorded, np.diff(self._recorded.starts)
        offsets = np.arange(lengths.sum()) - np.repeat(recorded.starts[:-1], lengths)
        return np.repeat(recorded.request_ids, lengths), np.repeat(recorded.first_positions, lengths) + offsets

    def repeats(self, request_ids: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Tell for each token [tokens] whether the trace repeats itself for it, so that results can say how many
        did. Blocks of layers behind the first are left out: all of their rows are also those of other tokens."""
        return self._recorded.find(request_ids, positions, 0, self._places.num_blocks)[1]


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
    weights = [row.weights for row in parts if row.weights is not None]
    return Recorded(
        header=header,
        request_ids=np.array(list(ordered), dtype=np.int64),
        first_positions=np.array([request_rows[0].position for request_rows in ordered.values()], dtype=np.int64),
        starts=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        experts=np.concatenate([row.experts for row in parts]),
        predicted=np.concatenate(predicted) if predicted else None,
        confidence=np.concatenate(confidence) if confidence else None,
        weights=np.concatenate(weights) if weights else None,
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
        ("experts", header.experts, model.num_experts),
        ("k", header.k, model.experts_per_token),
    ):
        told = f"{path}, line 1: '{name}' must be {needed} for this model, got {found} (recorded from {header.model})"
        require(found == needed, "path", told)
    num_blocks, count = -(-len(layers) // header.layers), len(recorded.request_ids)
    told = f"{len(layers)} layers in blocks of its {header.layers}: {num_blocks} requests, or longer ones; got {count}"
    require(recorded.holds(num_blocks), "path", f"{path}: too short for {told}")
    return TraceRouting(recorded, path.name, layers)
