"""Compute the expert FFN through torch's GEMM, and decide when that is faster: with bfloat16 units (AMX), for many
tokens."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from kernels.ffn import Gating

THRESHOLD_VARIABLE = "KERNELS_GEMM_TOKENS"  # tokens from which torch is taken, or "never": overrides the measurement
_MEASURED_TOKENS = (16, 64, 256)
_NEVER = 1 << 62
_thresholds: dict[tuple[int, int], int] = {}  # by the kernel's and torch's number of threads


def gemm_is_faster(num_tokens: int, num_threads: int) -> bool:
    """Decide by the environment's KERNELS_GEMM_TOKENS, or by a measurement of some 0.1 s at the first call that needs
    it."""
    asked = os.environ.get(THRESHOLD_VARIABLE)
    if asked:
        if asked != "never" and not asked.isdecimal():
            raise ValueError(f"{THRESHOLD_VARIABLE}: expected a number of tokens or never, got {asked!r}")
        return asked != "never" and num_tokens >= int(asked)
    if num_tokens < _MEASURED_TOKENS[0]:
        return False
    case = (num_threads, torch.get_num_threads())
    if case not in _thresholds:
        _thresholds[case] = measured_threshold(num_threads)
    return num_tokens >= _thresholds[case]


def measured_threshold(num_threads: int) -> int:
    """Return the least of 16, 64 and 256 tokens from which on torch beats the kernel on these very threads."""
    from kernels.ffn import expert_ffn

    generator = torch.Generator().manual_seed(0)
    gate, up, down = (torch.randn(768, 768, generator=generator).bfloat16() for _ in range(3))
    threshold = _NEVER
    for num_tokens in reversed(_MEASURED_TOKENS):
        x = torch.randn(num_tokens, 768, generator=generator).bfloat16()
        times_s = {}
        for method in ("kernel", "gemm"):
            out = torch.empty_like(x)
            times_s[method] = _best_s(
                partial(expert_ffn, x, gate, up, down, out, num_threads=num_threads, method=method)
            )
        if times_s["kernel"] <= times_s["gemm"]:
            break
        threshold = num_tokens
    return threshold


def _best_s(call: Callable[[], None]) -> float:
    """Return the shortest of a few runs in seconds: a stolen core disturbs the minimum least."""
    times_s = []
    for _ in range(3):
        start_s = time.perf_counter()
        call()
        times_s.append(time.perf_counter() - start_s)
    return min(times_s)


@torch.no_grad()  # weights may be parameters: the kernel records nothing in `out` either
def gemm_ffn(
    x: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    out: torch.Tensor,
    row_weights: torch.Tensor | None,
    gating: Gating,
    biases: tuple[torch.Tensor | None, ...],
    accumulate: bool,
) -> None:
    """Do the work of `expert_ffn` with arguments that are already checked."""
    gate_bias, up_bias, down_bias = biases
    x = x.bfloat16()
    gated = _gated(_projected(x, gate, gate_bias), _projected(x, up, up_bias), gating)
    result = _projected(gated.bfloat16(), down, down_bias)
    if row_weights is not None:
        result *= row_weights[:, None]
    if accumulate:
        out.copy_(out + result)
    else:
        out.copy_(result)


def _projected(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    product = F.linear(x, weight).float()
    return product if bias is None else product + bias


def _gated(gate: torch.Tensor, up: torch.Tensor, gating: Gating) -> torch.Tensor:
    if gating.activation == "clamped_swiglu":
        gate, up = gate.clamp(max=gating.limit), up.clamp(-gating.limit, gating.limit)
        return (up + 1) * gate * torch.sigmoid(gating.alpha * gate)
    if gating.activation == "silu":
        return F.silu(gate) * up
    return F.gelu(gate, approximate="tanh" if gating.activation == "gelu_tanh" else "none") * up
