"""x @ weight.T with bfloat16 weights, against the read ceiling, torch and vLLM: each weight is read once.

The weights are several matrices of Mixtral's FFN size, or of 8 MB, taken in turn, which together exceed the caches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.conftest import Scale
from benchmarks.support import weight_data as data
from benchmarks.support.decode_data import huge_array
from benchmarks.support.paged_attention import as_bf16
from benchmarks.support.peers import Peer
from benchmarks.support.rounds import Rounds
from benchmarks.support.torch_threads import with_threads
from benchmarks.support.weight_data import WeightShape
from kernels import linear

SIZES = {"": (4096, 14336), "8 MB, ": (2048, 2048)}  # depth and outputs, by what stands before a row's name
QUICK_DEPTH, QUICK_NUM_OUTPUTS = 512, 256
NUM_ROWS = (1, 4, 8, 16, 64)
ROUNDED = 0.1  # largest error of a peer that rounds to bfloat16, over the outputs' standard deviation


class Matrices:
    def __init__(self, name: str, scale: Scale, vllm_python: str | None) -> None:
        self.name = name
        depth, outputs = (QUICK_DEPTH, QUICK_NUM_OUTPUTS) if scale.quick else SIZES[name]
        count = -(-scale.working_set_bytes // (depth * outputs * 2))
        bits = huge_array((count, outputs, depth), np.uint16)
        for number, matrix in enumerate(bits):
            data.fill(matrix, number)
        self.weights = as_bf16(bits)
        shape = WeightShape(depth, outputs, count, NUM_ROWS)
        self.peers = [Peer("vllm", vllm_python, "linear", shape)] if vllm_python else []

    def inputs(self, num_rows: int) -> torch.Tensor:
        return as_bf16(data.inputs(num_rows, self.weights.shape[2]))

    def kernels_of_peers(self, num_rows: int) -> list[tuple[Peer, str]]:
        return [(peer, name) for peer in self.peers for name in peer.kernels if name.endswith(f", {num_rows} rows")]

    def each(self, multiply: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], None]:
        """Make a call of `multiply` on every matrix in turn."""

        def run() -> None:
            for weight in self.weights:
                multiply(weight)

        return run


@pytest.fixture(scope="module", params=list(SIZES), ids=["117MB", "8MB"])
def matrices(request: pytest.FixtureRequest, scale: Scale, peer_pythons: dict[str, str]) -> Iterator[Matrices]:
    matrices = Matrices(request.param, scale, peer_pythons.get("vllm"))
    yield matrices
    for peer in matrices.peers:
        peer.close()


@pytest.mark.parametrize("num_rows", NUM_ROWS)
def test_linear(
    benchmark: Any, report: Any, ceilings: Any, matrices: Matrices, scale: Scale, num_rows: int, num_threads: int
) -> None:
    x = matrices.inputs(num_rows)
    torch_run = with_threads(matrices.each(lambda weight: torch.nn.functional.linear(x, weight)), num_threads)
    kernels = {f"{peer.name}, {name.split(',')[0]}": (peer, name) for peer, name in matrices.kernels_of_peers(num_rows)}
    peers = {name: peer.stopwatch(kernel, num_threads) for name, (peer, kernel) in kernels.items()}
    others = {"read ceiling": ceilings.read(num_threads), "torch": torch_run, **peers}
    rounds = Rounds(
        "ours", matrices.each(lambda weight: linear(x, weight, num_threads=num_threads)), others, num_threads
    )
    rounds.measure(benchmark, scale.num_rounds)
    seconds = rounds.median_s("ours")
    report(
        rounds,
        kernel="linear",
        shape=f"{matrices.name}{num_rows} rows",
        num_rows=num_rows,
        num_threads=num_threads,
        weight_bytes=matrices.weights.nbytes,
        gb_s=matrices.weights.nbytes / seconds / 1e9,
        gflop_s=2 * num_rows * matrices.weights.numel() / seconds / 1e9,
        read_ceiling_gb_s=ceilings.num_bytes / rounds.median_s("read ceiling") / 1e9,
        share_of_ceiling=rounds.ratio("read ceiling", "ours") * matrices.weights.nbytes / ceilings.num_bytes,
        times_faster_than={name: rounds.ratio(name, "ours") for name in ("torch", *peers)},
        peers={peer.name: peer.version for peer in matrices.peers},
    )
    weight = matrices.weights[-1]
    expected = x.double() @ weight.double().T
    torch.testing.assert_close(linear(x, weight).double(), expected, rtol=2**-7, atol=1e-3)
    for peer, kernel in kernels.values():
        found = torch.from_numpy(peer.output(kernel)).double()
        torch.testing.assert_close(found, expected, rtol=0, atol=ROUNDED * float(expected.std()))
