"""Compute the expert FFN through torch's GEMM, and decide where that is faster: for many tokens on AMD's processors
with AVX512_BF16."""

from __future__ import annotations

import os

import torch
import torch.nn.functional as F

from kernels.cpu import isa
from kernels.gating import Gating

THRESHOLD_VARIABLE = "KERNELS_GEMM_TOKENS"  # tokens from which torch is taken, or "never": overrides the table
# By code path: tokens from which on torch is faster, on one thread and on several (docs/kernels.md, "Expert FFN"). On
# the other paths the kernel was faster with any number of tokens, or nobody has measured.
_TORCH_FROM_TOKENS = {"avx512bf16": (32, 64)}


def gemm_from_tokens(num_threads: int) -> int | None:
    """Return the least number of tokens for which torch's GEMM computes the expert FFN; None where it never does.

    It is the environment's KERNELS_GEMM_TOKENS, or what was measured on this code path. No timing decides: the two
    round differently, and equal runs must give equal tokens.
    """
    asked = os.environ.get(THRESHOLD_VARIABLE)
    if asked:
        if asked != "never" and not asked.isdecimal():
            raise ValueError(f"{THRESHOLD_VARIABLE}: expected a number of tokens or never, got {asked!r}")
        return None if asked == "never" else int(asked)
    one, several = _TORCH_FROM_TOKENS.get(isa(), (None, None))
    return one if num_threads == 1 else several


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
    x = x.to(gate.dtype)
    gated = _gated(_projected(x, gate, gate_bias), _projected(x, up, up_bias), gating)
    result = _projected(gated.to(gate.dtype), down, down_bias)
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
