"""Record what a real run's routers chose, and what they got, in the run's folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from harness.config import require
from harness.routing.hidden_file import HiddenHeader, HiddenWriter, max_tokens
from harness.routing.token_sample import TokenSample, sample_tokens
from harness.routing.trace_file import TraceHeader, TraceRow, TraceWriter

if TYPE_CHECKING:
    from harness.engine.sequences import Sequence
    from harness.model.spec import ModelSpec

FILE_NAME = "routing.jsonl.gz"
HIDDEN_FOLDER = "hidden"
RecordRouting = Literal[False, True, "weights"]


def hidden_sample(
    spec: ModelSpec, source: str, sequences: list[Sequence], *, limit_mb: float, seed: int
) -> TokenSample:
    """Sample as many tokens of the workload as can be recorded within `limit_mb` (10^6 bytes). Raises ConfigError where
    that is none."""
    positions = {sequence.request.request_id: sequence.max_tokens for sequence in sequences}
    total = sum(positions.values())
    header = _hidden_header(spec, source, TokenSample(seed, 2**64, total, total))
    count = max_tokens(header, int(limit_mb * 1e6))
    told = f"holds no token of this model, which takes {header.token_bytes / 1e6:.3g} MB; got {limit_mb:g}"
    require(count >= 1, "record_hidden_mb", told)
    return sample_tokens(positions, count, seed)


@contextmanager
def recording(
    folder: Path, spec: ModelSpec, source: str, *, routing: RecordRouting, sample: TokenSample | None
) -> Iterator[Callable[[Sequence], None]]:
    """Yield a function that takes each sequence when it has ended. It records the routing and, where there is a
    `sample`, what the routers got of the sampled tokens; nothing where neither is wanted."""
    recorders: list[RoutingRecorder | HiddenRecorder] = []
    with ExitStack() as closing:
        if routing:
            recorders.append(RoutingRecorder(folder, spec, source, weights=routing == "weights"))
            closing.callback(recorders[-1].close)
        if sample is not None:
            recorders.append(HiddenRecorder(folder, spec, source, sample))
            closing.callback(recorders[-1].close)

        def record(sequence: Sequence) -> None:
            for recorder in recorders:
                recorder.add(sequence)
            for life in sequence.lives:  # the routing alone is verified
                life.weights.clear()
                life.inputs.clear()

        yield record


class RoutingRecorder:
    """Writes `routing.jsonl.gz` into a run folder, sequence by sequence as they finish."""

    def __init__(self, folder: Path, spec: ModelSpec, source: str, *, weights: bool = False) -> None:
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
                weights=weights,
            ),
        )

    def add(self, sequence: Sequence) -> None:
        """Write a sequence's routing. Nothing is written for a sequence that never went through the model (rejected, or
        the run ended early)."""
        routing = last_recorded(sequence, "routing")
        if routing is not None:
            weights = last_recorded(sequence, "weights") if self._writer.header.weights else None
            self._writer.write(TraceRow(sequence.request.request_id, 0, routing, weights=weights))

    def close(self) -> None:
        self._writer.close()


class HiddenRecorder:
    """Writes parts of `hidden/` into a run folder as sequences finish: what the routers got of sampled tokens."""

    def __init__(self, folder: Path, spec: ModelSpec, source: str, sample: TokenSample) -> None:
        self._dtype, self._sample = spec.dtype, sample
        self._writer = HiddenWriter(folder / HIDDEN_FOLDER, _hidden_header(spec, source, sample))

    def add(self, sequence: Sequence) -> None:
        """Write a sequence's sampled tokens; each stands where the last time that it was computed has put it."""
        routing, inputs = last_recorded(sequence, "routing"), last_recorded(sequence, "inputs")
        if routing is None or inputs is None:
            return
        request = sequence.request.request_id
        positions = np.arange(len(routing))
        positions = positions[self._sample(np.full(len(routing), request), positions)]
        self._writer.add(request, positions, as_numbers(inputs, self._dtype), routing[positions])

    def close(self) -> None:
        self._writer.close()


def last_recorded(sequence: Sequence, what: Literal["routing", "weights", "inputs"]) -> NDArray[Any] | None:
    """Return what was recorded of a sequence, by position from 0 on (`inputs`: by sampled position); None where there
    is nothing. Where a preempted sequence computed a position again, the last time counts."""
    assert sequence.records is not None, f"request {sequence.request.request_id}: its routing was not recorded"
    last: NDArray[Any] | None = None
    for life in sequence.lives:  # each begins again at position 0
        passes: list[NDArray[Any]] = getattr(life, what)
        if passes:
            again = np.concatenate(passes)
            last = again if last is None else np.concatenate([again, last[len(again) :]])
    return last


def as_numbers(rows: NDArray[np.uint8], dtype: str) -> NDArray[Any]:
    """Return the numbers [..., n] in rows of bytes of a model's dtype; those in bfloat16 become float32, as which it is
    the upper half."""
    if dtype != "bfloat16":
        return rows.view(dtype)
    return (rows.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)


def _hidden_header(spec: ModelSpec, source: str, sample: TokenSample) -> HiddenHeader:
    layers = spec.moe_layers
    return HiddenHeader(
        model=spec.name,
        source=source,
        first_layer=layers[0],
        layers=len(layers),
        hidden=spec.hidden_dim,
        experts=spec.num_experts,
        k=spec.experts_per_token,
        num_sampled=sample.num_sampled,
        num_tokens=sample.num_tokens,
        seed=sample.seed,
    )
