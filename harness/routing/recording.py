"""Record a real run's routing decisions as a routing trace in the run's folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from harness.routing.trace_file import TraceHeader, TraceRow, TraceWriter

if TYPE_CHECKING:
    from harness.engine.sequences import Sequence
    from harness.model.spec import ModelSpec

FILE_NAME = "routing.jsonl.gz"


@contextmanager
def recording(wanted: bool, folder: Path, spec: ModelSpec, source: str) -> Iterator[Callable[[Sequence], None]]:
    """Yield a function that takes each sequence when it has ended; it does nothing unless recording is wanted."""
    if not wanted:
        yield lambda sequence: None
        return
    recorder = RoutingRecorder(folder, spec, source)
    try:
        yield recorder.add
    finally:
        recorder.close()


class RoutingRecorder:
    """Writes `routing.jsonl.gz` into a run folder, sequence by sequence as they finish."""

    def __init__(self, folder: Path, spec: ModelSpec, source: str) -> None:
        layers = spec.moe_layers
        self._writer = TraceWriter(
            folder / FILE_NAME,
            TraceHeader(
                model=spec.name,
                first_layer=layers[0],
                layers=len(layers),
                experts=spec.num_experts,
                k=spec.experts_per_token,
                source=source,
            ),
        )

    def add(self, sequence: Sequence) -> None:
        """Write a sequence's routing. Nothing is written for a sequence that never went through the model (rejected, or
        the run ended early)."""
        routing = last_routing(sequence)
        if routing is not None:
            self._writer.write(TraceRow(sequence.request.request_id, 0, routing))

    def close(self) -> None:
        self._writer.close()


def last_routing(sequence: Sequence) -> NDArray[np.int16] | None:
    """Return a sequence's routing [positions, layers, k] from position 0 on; None where there is none. Where a
    preempted sequence computed a position again, the last time counts."""
    assert sequence.records_routing, f"request {sequence.request.request_id}: its routing was not recorded"
    routing: NDArray[np.int16] | None = None
    for life in sequence.lives:  # each begins again at position 0
        if life.routing:
            again = np.concatenate(life.routing)
            routing = again if routing is None else np.concatenate([again, routing[len(again) :]])
    return routing
