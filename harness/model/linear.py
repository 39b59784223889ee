"""`linear`: x @ weight.T in the way that is fastest for bfloat16 on this CPU.

Cores with bfloat16 matrix units (AMX) run torch's native GEMM far above float32 speed. On cores without, torch's
bfloat16 product runs at a third of float32's and widening the weights first costs more than the product for few rows;
there the C++ kernel reads bfloat16 weights in place (docs/kernels.md). One short measurement per process decides. The
result is rounded to bfloat16 once either way; the two differ only in the order of float32 sums.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import lru_cache

import torch
import torch.nn.functional as F

import kernels

METHOD_VARIABLE = "MOE_HARNESS_BF16_LINEAR"  # "native" or "kernel": overrides the measurement


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """[m, n_in] times a weight [n_out, n_in] of the same dtype -> [m, n_out] in that dtype."""
    if x.device.type != "cpu" or x.dtype != torch.bfloat16 or bf16_method() == "native":
        return F.linear(x, weight)
    return kernels.linear(x, weight)


@lru_cache(maxsize=1)
def bf16_method() -> str:
    """Either "native" or "kernel": measured at the first call (a few ms) unless the environment variable says."""
    asked = os.environ.get(METHOD_VARIABLE)
    if asked:
        if asked not in ("native", "kernel"):
            raise ValueError(f"{METHOD_VARIABLE}: must be native or kernel, got {asked!r}")
        return asked
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 768, generator=generator).bfloat16()
    weight = torch.randn(1024, 768, generator=generator).bfloat16()
    return "kernel" if _best_s(kernels.linear, x, weight) < _best_s(F.linear, x, weight) else "native"


def _best_s(multiply: Callable[..., torch.Tensor], x: torch.Tensor, weight: torch.Tensor) -> float:
    """Shortest of a few runs: the minimum is what a stolen core disturbs least."""
    times_s = []
    for _ in range(5):
        start_s = time.perf_counter()
        multiply(x, weight)
        times_s.append(time.perf_counter() - start_s)
    return min(times_s)
