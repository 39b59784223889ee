"""Temporaries of a kernel from one piece of memory that the caller planned, so that no pass allocates."""

from __future__ import annotations

from math import prod

import torch

from kernels.triton.sizes import ALIGNMENT_BYTES, aligned


class Scratch:
    """Hands out tensors one behind the other from `memory`, uint8 and contiguous, on any device."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory
        self._at = -memory.data_ptr() % ALIGNMENT_BYTES

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        nbytes = prod(shape) * dtype.itemsize
        end = self._at + nbytes
        assert end <= self._memory.numel(), f"{shape} {dtype} does not fit {self._memory.numel()} bytes of scratch"
        taken = self._memory[self._at : end].view(dtype).view(shape)
        self._at += aligned(nbytes)
        return taken
