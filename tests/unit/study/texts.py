"""Make small recorded texts for tests, of random requests or of routing that is known."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from harness.routing.trace_file import TraceHeader, TraceRow, TraceWriter
from harness.study.recorded import Text


def text_of(experts: list[np.ndarray], num_experts: int, words: np.ndarray | None = None) -> Text:
    """Build a text from the experts [positions, layers, k] of each request."""
    starts = np.concatenate([[0], np.cumsum([len(request) for request in experts])]).astype(np.int64)
    whole = np.concatenate(experts).astype(np.int16)
    return Text(num_experts, starts, whole, np.arange(len(whole)), words)


def random_experts(rng: np.random.Generator, positions: int, layers: int, num_experts: int, k: int) -> np.ndarray:
    """Draw experts by a popularity that falls with the expert's number."""
    noise = rng.gumbel(size=(positions, layers, num_experts)) - 0.2 * np.arange(num_experts)
    return np.argsort(-noise, axis=2)[:, :, :k]


def random_text(seed: int, *, lengths=(5, 1, 7, 4), layers: int = 3, num_experts: int = 6, k: int = 2) -> Text:
    rng = np.random.default_rng(seed)
    experts = [random_experts(rng, length, layers, num_experts, k) for length in lengths]
    return text_of(experts, num_experts, rng.integers(0, 4, size=sum(lengths)))


def write_trace(path: Path, text: Text, *, first_layer: int = 0, ids: Sequence[int] = ()) -> Path:
    """Write the trace of a text, whose requests have these ids, or count from 0."""
    header = TraceHeader(
        model="tested",
        layers=text.num_layers,
        experts=text.num_experts,
        k=text.k,
        source="a test",
        first_layer=first_layer,
    )
    writer = TraceWriter(path, header)
    for number, (start, end) in enumerate(zip(text.starts[:-1], text.starts[1:], strict=True)):
        writer.write(TraceRow(ids[number] if ids else number, 0, text.experts[start:end]))
    writer.close()
    return path
