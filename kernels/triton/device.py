"""The kernels share these helpers on the device, and facts about where they run.

Sizes that change from pass to pass, and pointers into the middle of a buffer, are `do_not_specialize` everywhere:
Triton would compile a kernel again, inside a pass, for the first size that 16 divides.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

from kernels.triton.tiling import Chip


@triton.jit
def product(a, b, total, WIDEN: tl.constexpr):
    """Return total + a @ b with float32 sums. TF32 is not used: float32 keeps all its digits. For WIDEN see
    `widens`."""
    if WIDEN:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, total, input_precision="ieee")


INTERPRETED = not isinstance(product, JITFunction)  # decided by TRITON_INTERPRET at import


def widens(tensor: torch.Tensor) -> bool:
    """Return whether to widen operands: Triton's interpreter multiplies bfloat16 bit patterns as if they were integers.
    Wide operands give what a GPU does."""
    return INTERPRETED and tensor.dtype is torch.bfloat16


@lru_cache(maxsize=16)
def chip(device: torch.device) -> Chip:
    """Return the facts about a device that tile sizes depend on."""
    if device.type != "cuda":
        return Chip()
    properties: Any = torch.cuda.get_device_properties(device)
    return Chip(
        major=int(properties.major),
        shared_bytes=int(properties.shared_memory_per_block_optin),
        processors=int(properties.multi_processor_count),
    )


def power_of_two(least: int) -> int:
    return int(triton.next_power_of_2(least))


def cdiv(a: int, b: int) -> int:
    return -(-a // b)
