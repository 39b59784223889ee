"""`linear` computes x @ weight.T in the way that is fastest for 16-bit weights on a CPU.

The C++ kernel reads bfloat16 and float16 weights in place. torch is slower: without bfloat16 units it runs at a third
of float32's speed, and widening the weights first costs more than the product for few rows. Only on AMD's processors
with AVX512_BF16 torch is faster, for many rows (docs/kernels.md, "Linear"). The measurements there decide, and no
timing here: the two ways differ in the order of float32 sums, and equal runs must give equal tokens. Both round to
bfloat16 once. torch's product of float16 was not measured: the kernel does all of these.
"""

from __future__ import annotations

import os
from functools import lru_cache

import torch
import torch.nn.functional as F

import kernels
from kernels.gemm import gemm_from_tokens

METHOD_VARIABLE = "MOE_HARNESS_BF16_LINEAR"  # "kernel", or "native" for torch's own product: overrides the table
_BY_PATH = {"avx512bf16": "native"}  # with 64 rows 1.6 times as fast on one thread; "kernel" on the other code paths


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiply [m, n_in] by a weight [n_out, n_in] of the same dtype -> [m, n_out] in that dtype."""
    by_kernel = x.dtype == torch.float16 or (x.dtype == torch.bfloat16 and bf16_method() == "kernel")
    return kernels.linear(x, weight) if by_kernel and x.device.type == "cpu" else F.linear(x, weight)


@lru_cache(maxsize=1)
def bf16_method() -> str:
    """Return "kernel" or "native": by the environment's MOE_HARNESS_BF16_LINEAR, else by this CPU's code path."""
    asked = os.environ.get(METHOD_VARIABLE) or _BY_PATH.get(kernels.isa(), "kernel")
    if asked not in ("native", "kernel"):
        raise ValueError(f"{METHOD_VARIABLE}: must be native or kernel, got {asked!r}")
    return asked


def cpu_products() -> str:
    """Say, for the records, by what code CPUs multiply here: runs that differ in it may round differently."""
    by_torch = {f"{n} thread{'s' * (n > 1)}": gemm_from_tokens(n) for n in (1, 2)}
    experts = ", ".join(f"from {tokens} tokens on {name}" for name, tokens in by_torch.items() if tokens is not None)
    torch_too = f"; experts by torch {experts}" if experts else ""
    return f"{kernels.isa()}, bfloat16 linear by {bf16_method()}{torch_too}"
