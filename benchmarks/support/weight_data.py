"""Make the weights and inputs of experts and linear layers with numpy only: peers build the same problem in their own
environments.

A matrix repeats a short random table whose length is a prime, so that no two of its rows are the same.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

import numpy as np

from benchmarks.support.decode_data import bf16_bits

NUM_VALUES = 1048573  # a prime


@dataclass(frozen=True)
class WeightShape:
    """A shape has `count` experts of one size, or as many linear layers with `expert_dim` outputs. `num_rows` lists how
    many rows of x each is multiplied with, one number a contest."""

    hidden: int
    expert_dim: int
    count: int
    num_rows: tuple[int, ...]

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> WeightShape:
        values = json.loads(text)
        return WeightShape(**{**values, "num_rows": tuple(values["num_rows"])})


def _table() -> np.ndarray:
    return np.random.default_rng(31).standard_normal(NUM_VALUES, dtype=np.float32)


def fill(matrix: np.ndarray, number: int) -> None:
    """Write bfloat16 bits to `matrix` [outputs, depth], other ones for each number. A product with rows of standard
    normal x then has a standard deviation of 1."""
    values = np.roll(bf16_bits(_table() / matrix.shape[1] ** 0.5), -7919 * number)
    flat = matrix.reshape(-1)
    for start in range(0, flat.size, NUM_VALUES):
        part = flat[start : start + NUM_VALUES]
        part[:] = values[: part.size]


def inputs(num_rows: int, depth: int) -> np.ndarray:
    """Return x as bfloat16 bits [num_rows, depth]."""
    return bf16_bits(np.random.default_rng(32).standard_normal((num_rows, depth), dtype=np.float32))
