"""The FFN of experts on the CPU, against the read and GEMM ceilings, torch and vLLM: its time as a function of its
tokens.

Two experts of Mixtral 8x7B in turn, 704 MB of weights, which exceed the caches; and small experts, as many as exceed
them too, all in one call as a layer has them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from benchmarks.conftest import Scale
from benchmarks.support import weight_data as data
from benchmarks.support.decode_data import huge_array
from benchmarks.support.paged_attention import as_bf16
from benchmarks.support.peers import Peer
from benchmarks.support.rounds import Rounds
from benchmarks.support.stopwatch import Stopwatch, stopwatch
from benchmarks.support.torch_threads import with_threads
from benchmarks.support.weight_data import WeightShape

pytest.importorskip("kernels.ffn", reason="this version has no expert FFN")
from kernels import ExpertWeights, expert_ffn, expert_ffns, isa

HIDDEN, EXPERT_DIM, NUM_EXPERTS = 4096, 14336, 2
QUICK_HIDDEN, QUICK_EXPERT_DIM = 256, 512
SMALL = {"9 MB": (2048, 768), "17 MB": (2048, 1408)}  # Qwen3-30B-A3B; DeepSeek-V2-Lite and Moonlight
NUM_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128)
NUM_TOKENS_OF_SMALL = (1, 4, 16, 64)
ROUNDED = 0.1  # largest error of a peer that rounds to bfloat16 between products, over the outputs' standard deviation
# What the kernel multiplies in, by code path: the hidden activations, a third of the work, are float32.
MULTIPLIES = {"amx": {torch.bfloat16: 1.0}, "avx512bf16": {torch.bfloat16: 2 / 3, torch.float32: 1 / 3}}
FEW_TOKENS = 16  # beyond them a run is long: fewer rounds


class Experts:
    """Experts of one size, with the peer's process that has the same ones where vLLM is at hand."""

    def __init__(
        self, hidden: int, expert_dim: int, num_experts: int, num_tokens: tuple[int, ...], vllm_python: str | None
    ) -> None:
        self.hidden, self.expert_dim = hidden, expert_dim
        sizes = ((expert_dim, hidden),) * 2 + ((hidden, expert_dim),)
        # One array, as the host tier is: the ends of small arrays would have no huge pages.
        matrices = huge_array((3 * num_experts, expert_dim * hidden), np.uint16)
        for number, matrix in enumerate(matrices):
            data.fill(matrix.reshape(sizes[number % 3]), number)
        tensors = [as_bf16(matrix.reshape(sizes[number % 3])) for number, matrix in enumerate(matrices)]
        self.weights = [tensors[first : first + 3] for first in range(0, len(tensors), 3)]
        shape = WeightShape(hidden, expert_dim, num_experts, num_tokens)
        self.peers = [Peer("vllm", vllm_python, "experts", shape)] if vllm_python else []

    def close(self) -> None:
        for peer in self.peers:
            peer.close()

    @property
    def num_weights(self) -> int:
        return sum(matrix.numel() for matrices in self.weights for matrix in matrices)

    def inputs(self, num_tokens: int) -> torch.Tensor:
        return as_bf16(data.inputs(num_tokens, self.hidden))

    def ours(self, x: torch.Tensor, out: torch.Tensor, num_threads: int) -> Callable[[], None]:
        def run() -> None:
            for gate, up, down in self.weights:
                expert_ffn(x, gate, up, down, out, num_threads=num_threads, method="kernel")

        return run

    def in_one_call(self, x: torch.Tensor, out: torch.Tensor, num_threads: int) -> Callable[[], None]:
        experts = [ExpertWeights(*matrices) for matrices in self.weights]
        rows, counts = x.repeat(len(experts), 1), [len(x)] * len(experts)

        def run() -> None:
            expert_ffns(rows, counts, experts, out, num_threads=num_threads, method="kernel")

        return run

    def by_torch(self, x: torch.Tensor) -> Callable[[], None]:
        def run() -> None:
            for gate, up, down in self.weights:
                F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)

        return run

    def by_peers(self, num_tokens: int, num_threads: int) -> dict[str, Stopwatch]:
        """Return each peer's call for all experts."""
        return {
            f"{peer.name}, {kernel.split(',')[0]}": peer.stopwatch(kernel, num_threads)
            for peer in self.peers
            for kernel in peer.kernels
            if kernel.endswith(f", {num_tokens} tokens")
        }

    def check(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Compare a row of the last expert with float64: ours, and the peers'."""
        gate, up, down = (matrix.double() for matrix in self.weights[-1])
        expected = (F.silu(x[:1].double() @ gate.T) * (x[:1].double() @ up.T)) @ down.T
        torch.testing.assert_close(out[:1].double(), expected, rtol=0, atol=1e-3)
        for peer in self.peers:
            for kernel in peer.kernels:
                if kernel.endswith(f", {len(x)} tokens"):
                    found = torch.from_numpy(peer.output(kernel))[:1].double()
                    torch.testing.assert_close(found, expected, rtol=0, atol=ROUNDED * float(expected.std()))


@pytest.fixture(scope="module")
def experts(scale: Scale, peer_pythons: dict[str, str]) -> Iterator[Experts]:
    sizes = (QUICK_HIDDEN, QUICK_EXPERT_DIM) if scale.quick else (HIDDEN, EXPERT_DIM)
    experts = Experts(*sizes, NUM_EXPERTS, NUM_TOKENS, peer_pythons.get("vllm"))
    yield experts
    experts.close()


@pytest.fixture(scope="module", params=list(SMALL))
def small_experts(
    request: pytest.FixtureRequest, scale: Scale, peer_pythons: dict[str, str]
) -> Iterator[tuple[str, Experts]]:
    hidden, expert_dim = SMALL[request.param]
    count = -(-scale.working_set_bytes // (6 * hidden * expert_dim)) + 1
    experts = Experts(hidden, expert_dim, count, NUM_TOKENS_OF_SMALL, peer_pythons.get("vllm"))
    yield request.param, experts
    experts.close()


@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
def test_expert_ffn(
    benchmark: Any, report: Any, ceilings: Any, experts: Experts, scale: Scale, num_tokens: int, num_threads: int
) -> None:
    x = experts.inputs(num_tokens)
    gemm_shares = MULTIPLIES.get(isa(), {torch.float32: 1.0})
    out = torch.zeros(num_tokens, experts.hidden)
    others = {
        "read ceiling": ceilings.read(num_threads),
        "GEMM ceiling": ceilings.gflop(num_threads, gemm_shares),
        "torch": with_threads(experts.by_torch(x), num_threads),
        **(peers := experts.by_peers(num_tokens, num_threads)),
    }
    rounds = Rounds("ours", experts.ours(x, out, num_threads), others, num_threads)
    rounds.measure(benchmark, scale.num_rounds if num_tokens <= FEW_TOKENS else -(-scale.num_rounds // 3))
    seconds = rounds.median_s("ours")
    weight_bytes, flops = 2 * experts.num_weights, 2 * num_tokens * experts.num_weights
    report(
        rounds,
        kernel="expert_ffn",
        shape=f"{num_tokens} tokens",
        num_rows=num_tokens,
        num_threads=num_threads,
        weight_bytes=weight_bytes,
        expert_s=seconds / NUM_EXPERTS,
        gb_s=weight_bytes / seconds / 1e9,
        gflop_s=flops / seconds / 1e9,
        read_ceiling_gb_s=ceilings.num_bytes / rounds.median_s("read ceiling") / 1e9,
        gemm_ceiling_gflop_s=1 / rounds.median_s("GEMM ceiling"),
        share_of_ceiling=rounds.ratio("read ceiling", "ours") * weight_bytes / ceilings.num_bytes,
        gemm_dtype=" and ".join(str(dtype).removeprefix("torch.") for dtype in gemm_shares),
        share_of_gemm=rounds.ratio("GEMM ceiling", "ours") * flops / 1e9,
        times_faster_than={name: rounds.ratio(name, "ours") for name in ("torch", *peers)},
        peers={peer.name: peer.version for peer in experts.peers},
    )
    experts.check(x, out)


@pytest.mark.parametrize("num_tokens", NUM_TOKENS_OF_SMALL)
def test_small_experts(
    benchmark: Any,
    report: Any,
    ceilings: Any,
    small_experts: tuple[str, Experts],
    scale: Scale,
    num_tokens: int,
    num_threads: int,
) -> None:
    """Compute all of a layer's experts in one call, each with so many tokens."""
    size, experts = small_experts
    x = experts.inputs(num_tokens)
    num_experts = len(experts.weights)
    together, alone = torch.zeros(num_experts * num_tokens, experts.hidden), torch.zeros(num_tokens, experts.hidden)
    others = {
        "read ceiling": ceilings.read(num_threads),
        "ours, a call an expert": stopwatch(experts.ours(x, alone, num_threads)),
        "torch": with_threads(experts.by_torch(x), num_threads),
        **(peers := experts.by_peers(num_tokens, num_threads)),
    }
    rounds = Rounds("ours", experts.in_one_call(x, together, num_threads), others, num_threads)
    rounds.measure(benchmark, -(-scale.num_rounds // 3))
    seconds = rounds.median_s("ours")
    weight_bytes = 2 * experts.num_weights
    report(
        rounds,
        kernel="expert_ffns",
        shape=f"{size}, {num_tokens} tokens",
        num_rows=num_tokens,
        num_threads=num_threads,
        weight_bytes=weight_bytes,
        expert_s=seconds / num_experts,
        gb_s=weight_bytes / seconds / 1e9,
        gflop_s=num_tokens * weight_bytes / seconds / 1e9,
        read_ceiling_gb_s=ceilings.num_bytes / rounds.median_s("read ceiling") / 1e9,
        share_of_ceiling=rounds.ratio("read ceiling", "ours") * weight_bytes / ceilings.num_bytes,
        times_faster_than={name: rounds.ratio(name, "ours") for name in ("torch", "ours, a call an expert", *peers)},
        peers={peer.name: peer.version for peer in experts.peers},
    )
    assert torch.equal(together[-num_tokens:], alone), "one call and a call an expert differ"
    experts.check(x, alone)
