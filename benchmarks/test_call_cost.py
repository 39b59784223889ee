"""The fixed cost of a call: matrices and contexts so small that they stay in the first caches, in calls one after
another. The checks of arguments in Python are part of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from benchmarks.conftest import Scale
from benchmarks.support.decode_data import DecodeShape
from benchmarks.support.paged_attention import PagedAttention
from benchmarks.support.rounds import Rounds
from benchmarks.support.torch_attention import TorchAttention
from benchmarks.support.torch_threads import with_threads
from kernels import ExpertWeights, expert_ffn, expert_ffns, linear

HIDDEN, EXPERT_DIM, NUM_OUTPUTS = 64, 64, 256
SMALL_ATTENTION = DecodeShape("8 sequences", num_heads=8, num_kv_heads=2, head_dim=64, lengths=(16,) * 8)
NUM_CALLS, QUICK_NUM_CALLS = 500, 3
Call = Callable[[], object]


def matrix(outputs: int, depth: int) -> torch.Tensor:
    return (torch.randn(outputs, depth, generator=torch.Generator().manual_seed(3)) / depth**0.5).bfloat16()


def small_ffn(num_threads: int) -> tuple[Call, Call]:
    gate, up, down = matrix(EXPERT_DIM, HIDDEN), matrix(EXPERT_DIM, HIDDEN), matrix(HIDDEN, EXPERT_DIM)
    x, out = matrix(1, HIDDEN), torch.zeros(1, HIDDEN)
    return (
        lambda: expert_ffn(x, gate, up, down, out, num_threads=num_threads, method="kernel"),
        lambda: F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down),
    )


def checked_ffn(num_threads: int) -> tuple[Call, Call]:
    """Make the call of a layer's experts, whose weights were checked before."""
    gate, up, down = matrix(EXPERT_DIM, HIDDEN), matrix(EXPERT_DIM, HIDDEN), matrix(HIDDEN, EXPERT_DIM)
    expert = ExpertWeights(gate, up, down)
    x, out = matrix(1, HIDDEN), torch.zeros(1, HIDDEN)
    return (
        lambda: expert_ffns(x, [1], [expert], out, num_threads=num_threads, method="kernel"),
        lambda: F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down),
    )


def small_linear(num_threads: int) -> tuple[Call, Call]:
    weight, x = matrix(NUM_OUTPUTS, HIDDEN), matrix(1, HIDDEN)
    out = torch.zeros(1, NUM_OUTPUTS)
    return lambda: linear(x, weight, out, num_threads=num_threads), lambda: F.linear(x, weight)


def small_attention(num_threads: int) -> tuple[Call, Call]:
    return PagedAttention(SMALL_ATTENTION).ours(num_threads), TorchAttention(SMALL_ATTENTION).in_buckets


CASES = {
    "expert_ffn": small_ffn,
    "expert_ffns of one": checked_ffn,
    "linear": small_linear,
    "decode_attention": small_attention,
}


@pytest.mark.parametrize("case", list(CASES))
def test_call_cost(benchmark: Any, report: Any, scale: Scale, case: str, num_threads: int) -> None:
    ours, by_torch = CASES[case](num_threads)
    num_calls = QUICK_NUM_CALLS if scale.quick else NUM_CALLS

    def calls(one: Call) -> Call:
        def run() -> None:
            for _ in range(num_calls):
                one()

        return run

    others = {"torch": with_threads(calls(by_torch), num_threads)}
    rounds = Rounds("ours", calls(ours), others, num_threads)
    rounds.measure(benchmark, scale.num_rounds)
    report(
        rounds,
        kernel="call_cost",
        shape=case,
        num_threads=num_threads,
        call_us=1e6 * rounds.median_s("ours") / num_calls,
        fastest_call_us=1e6 * min(rounds.seconds("ours")) / num_calls,
        times_faster_than={"torch": rounds.ratio("torch", "ours")},
    )
