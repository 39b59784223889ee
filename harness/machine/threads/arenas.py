"""Memory behind planned buffers, for machines whose tiers are all ordinary process memory."""

from __future__ import annotations

import mmap
from collections.abc import Hashable, Sequence
from math import prod
from typing import Any

import numpy as np
import torch

from harness.memory.tiers import Buffer, Tier, make_tiers

TORCH_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int64": torch.int64,
    "int32": torch.int32,
    "uint8": torch.uint8,
}
_ALIGNMENT_BYTES = 4096
_POISON_BYTE = 0xFF  # all-ones is NaN in every float type and -1 in every integer type
_MAX_VIEWS = 4096  # of a root that are kept: shapes follow the tokens of a pass, which has no end of sizes


def tensor_of(array: np.ndarray) -> torch.Tensor:
    """Return a tensor of an array's numbers, in the same memory or, where the array is read-only, in its own: no tensor
    is read-only."""
    return torch.from_numpy(array) if array.flags.writeable else torch.tensor(array)


class Arenas:
    """One aligned uint8 tensor per reserved root buffer; the tiers never share memory."""

    def __init__(self, poison: bool, *, at_hand: bool = False) -> None:
        """Keep no memory yet. With `at_hand` a buffer's pages are there as soon as it is reserved, as a device's are:
        else the first op that writes to a page waits until the system has found and cleared one."""
        self._roots: dict[Buffer, torch.Tensor] = {}
        self._memos: dict[Buffer, dict[Hashable, Any]] = {}  # what ops keep about a root, for as long as it is backed
        self._views: dict[Buffer, dict[Hashable, torch.Tensor]] = {}
        self.poisons = poison
        self._at_hand = at_hand

    def tiers(self, capacities_bytes: dict[str, int]) -> dict[str, Tier]:
        return make_tiers(capacities_bytes, self.back, self.unback)

    def back(self, buffer: Buffer) -> None:
        if not buffer.backed:
            return
        self._roots[buffer], self._memos[buffer], self._views[buffer] = self._allocate(buffer), {}, {}
        if self.poisons:
            self._roots[buffer].fill_(_POISON_BYTE)

    def _allocate(self, buffer: Buffer) -> torch.Tensor:
        raw = torch.empty(buffer.nbytes + _ALIGNMENT_BYTES, dtype=torch.uint8)
        if self._at_hand:
            raw[:: mmap.PAGESIZE] = 0
        skip = -raw.data_ptr() % _ALIGNMENT_BYTES
        return raw[skip : skip + buffer.nbytes]

    def unback(self, buffer: Buffer) -> None:
        if not buffer.backed:
            return
        del self._roots[buffer], self._memos[buffer], self._views[buffer]

    def close(self) -> None:
        """Give all memory back, whoever still holds the machine or buffers; a view that an op still has keeps its."""
        for buffer in list(self._roots):
            self.unback(buffer)

    def memo(self, buffer: Buffer) -> dict[Hashable, Any]:
        return self._memos[buffer.root]

    def bytes_of(self, buffer: Buffer) -> torch.Tensor:
        """Return the buffer's memory as a uint8 view."""
        return self._roots[buffer.root][buffer.offset_bytes : buffer.offset_bytes + buffer.nbytes]

    def tensor(self, buffer: Buffer, shape: Sequence[int], dtype: str) -> torch.Tensor:
        """Return a view of the buffer's first bytes. The caller's shape must fit.

        A view is made once: each of the four steps to it lets other threads have the interpreter, and a thread that
        has lost it waits tens of microseconds until it is back.
        """
        shape = tuple(shape)
        views, key = self._views[buffer.root], (buffer.offset_bytes, buffer.nbytes, shape, dtype)
        found = views.get(key)
        if found is None:
            if len(views) >= _MAX_VIEWS:
                views.clear()
            found = views[key] = self._view(buffer, shape, dtype)
        return found

    def _view(self, buffer: Buffer, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        kind = TORCH_DTYPES[dtype]
        nbytes = prod(shape) * kind.itemsize
        assert nbytes <= buffer.nbytes, f"{shape} {dtype} does not fit {buffer}"
        return self.bytes_of(buffer)[:nbytes].view(kind).view(shape)
