"""Check tensor arguments, as in `check.tensor("ids", ids, (n, k), torch.int64, like)`.

Each check raises a ValueError that names the argument. The checks stand between Python and raw addresses.
"""

from __future__ import annotations

import torch

FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def floats(name: str, tensor: torch.Tensor, num_dims: int, *, strided: bool = False) -> None:
    """Check for bfloat16, float16 or float32 with `num_dims` dimensions, contiguous, or `strided` in the first one."""
    if tensor.dtype not in FLOATS:
        raise ValueError(f"{name}: expected bfloat16, float16 or float32, got {tensor.dtype}")
    if tensor.dim() != num_dims:
        raise ValueError(f"{name}: expected {num_dims} dimensions, got shape {tuple(tensor.shape)}")
    if not (tensor[:1] if strided else tensor).is_contiguous():
        raise ValueError(f"{name}: expected a contiguous tensor, got strides {tensor.stride()}")


def tensor(name: str, value: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, like: torch.Tensor) -> None:
    """Check for a contiguous tensor of this shape and dtype on the device of `like`."""
    if tuple(value.shape) != shape:
        raise ValueError(f"{name}: expected shape {shape}, got {tuple(value.shape)}")
    if value.dtype is not dtype:
        raise ValueError(f"{name}: expected {dtype}, got {value.dtype}")
    if not value.is_contiguous():
        raise ValueError(f"{name}: expected a contiguous tensor, got strides {value.stride()}")
    if value.device != like.device:
        raise ValueError(f"{name}: expected a tensor on {like.device}, got one on {value.device}")


def window(value: int | None) -> None:
    if value is not None and value < 1:
        raise ValueError(f"window: expected at least 1 or None (all tokens), got {value}")
