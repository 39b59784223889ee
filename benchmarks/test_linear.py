"""x @ weight.T with bfloat16 weights, against the read ceiling and torch: each weight is read once.

The weights are several matrices of Mixtral's FFN size, taken in turn, which together exceed the caches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.conftest import Scale
from benchmarks.support.decode_data import huge_array
from benchmarks.support.paged_attention import as_bf16
from benchmarks.support.rounds import Rounds
from benchmarks.support.torch_threads import with_threads
from kernels import linear

DEPTH, NUM_OUTPUTS = 4096, 14336
QUICK_DEPTH, QUICK_NUM_OUTPUTS = 512, 256


class Matrices:
    def __init__(self, scale: Scale) -> None:
        depth, outputs = (QUICK_DEPTH, QUICK_NUM_OUTPUTS) if scale.quick else (DEPTH, NUM_OUTPUTS)
        count = -(-scale.working_set_bytes // (depth * outputs * 2))
        self.weights = as_bf16(huge_array((count, outputs, depth), np.uint16))
        one = torch.randn(outputs, depth, generator=torch.Generator().manual_seed(5)) / depth**0.5
        self.weights[:] = one.bfloat16()

    def inputs(self, num_rows: int) -> torch.Tensor:
        shape = (num_rows, self.weights.shape[2])
        return torch.randn(shape, generator=torch.Generator().manual_seed(6)).bfloat16()

    def each(self, multiply: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], None]:
        """Make a call of `multiply` on every matrix in turn."""

        def run() -> None:
            for weight in self.weights:
                multiply(weight)

        return run


@pytest.fixture(scope="module")
def matrices(scale: Scale) -> Matrices:
    return Matrices(scale)


@pytest.mark.parametrize("num_rows", [1, 4, 8, 16, 64])
def test_linear(
    benchmark: Any, report: Any, ceilings: Any, matrices: Matrices, scale: Scale, num_rows: int, num_threads: int
) -> None:
    x = matrices.inputs(num_rows)
    torch_run = with_threads(matrices.each(lambda weight: torch.nn.functional.linear(x, weight)), num_threads)
    others = {"read ceiling": ceilings.read(num_threads), "torch": torch_run}
    rounds = Rounds(
        "ours", matrices.each(lambda weight: linear(x, weight, num_threads=num_threads)), others, num_threads
    )
    rounds.measure(benchmark, scale.num_rounds)
    seconds = rounds.median_s("ours")
    report(
        rounds,
        kernel="linear",
        shape=f"{num_rows} rows",
        num_rows=num_rows,
        num_threads=num_threads,
        weight_bytes=matrices.weights.nbytes,
        gb_s=matrices.weights.nbytes / seconds / 1e9,
        gflop_s=2 * num_rows * matrices.weights.numel() / seconds / 1e9,
        read_ceiling_gb_s=ceilings.num_bytes / rounds.median_s("read ceiling") / 1e9,
        share_of_ceiling=rounds.ratio("read ceiling", "ours") * matrices.weights.nbytes / ceilings.num_bytes,
        times_faster_than={"torch": rounds.ratio("torch", "ours")},
    )
    weight = matrices.weights[-1]
    expected = x.double() @ weight.double().T
    torch.testing.assert_close(linear(x, weight).double(), expected, rtol=2**-7, atol=1e-3)
