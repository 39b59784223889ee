"""Define models to route for, and one routing of every kind."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from hypothesis import settings

from harness.routing.trace_file import PredictionHeader, TraceHeader, TraceRow, TraceWriter

steady = settings(derandomize=True, max_examples=50)  # the same cases every time


@dataclass(frozen=True)
class Model:
    num_layers: int = 5
    num_experts: int = 16
    experts_per_token: int = 4
    num_dense_layers: int = 0

    @property
    def moe_layers(self) -> tuple[int, ...]:
        return tuple(range(self.num_dense_layers, self.num_layers))


MODEL = Model(num_layers=6, num_dense_layers=1)

SYNTHETIC = {
    "uniform": {"name": "uniform"},
    "skewed": {"name": "skewed", "zipf_exponent": 1.2},
    "correlated": {"name": "correlated", "keep_token": 0.6, "follow_layer": 0.5, "lookback": 8},
    "both": {"name": "correlated", "keep_token": 0.5, "follow_layer": 0.7, "zipf_exponent": 0.8},
}


def header(model: Model, *, predictions: PredictionHeader | None = None, weights: bool = False) -> TraceHeader:
    return TraceHeader(
        model="tested",
        layers=len(model.moe_layers),
        first_layer=model.num_dense_layers,
        experts=model.num_experts,
        k=model.experts_per_token,
        source="a test",
        weights=weights,
        predictions=predictions,
    )


def random_experts(rng: np.random.Generator, model: Model, num_positions: int) -> np.ndarray:
    """Draw [positions, layers, k], distinct in a row."""
    noise = rng.random((num_positions, len(model.moe_layers), model.num_experts))
    return noise.argsort(axis=-1)[..., : model.experts_per_token].astype(np.int16)


def write(path: Path, head: TraceHeader, *rows: TraceRow) -> Path:
    writer = TraceWriter(path, head)
    for row in rows:
        writer.write(row)
    writer.close()
    return path
