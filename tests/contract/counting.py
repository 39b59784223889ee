"""Count what ops would launch on a device, and what memory torch's allocator would have to give them."""

from __future__ import annotations

from bisect import bisect_left, insort

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from tests.contract.gpu_ops import DEVICE

_NO_LAUNCH = torch.ops.aten.empty, torch.ops.aten.new_empty, torch.ops.aten.empty_like
_ROUNDED_BYTES = 512  # torch's allocator gives multiples
_SMALL_BYTES = 1 << 20  # such pieces, and less, have memory of their own; no larger one leaves so little behind


class Watch(TorchDispatchMode):
    """Counts what would be launched on the device, and notes the memory that its results take and give back."""

    def __init__(self) -> None:
        super().__init__()
        self.launches = self.peak_bytes = 0
        self.from_host: list[str] = []
        self.events: list[tuple[int, int]] = []  # a number for each piece of memory with its bytes; 0 bytes: given back
        self._live: dict[int, tuple[StorageWeakRef, int, int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self._give_back()
        found = func(*args, **(kwargs or {}))
        given, results = tensors(args), tensors(found)
        if results and results[0].device == DEVICE and not func.is_view:
            self.launches += func.overloadpacket not in _NO_LAUNCH
            if any(t.device != DEVICE and t.dim() for t in given):
                self.from_host.append(str(func))
            known = {t.untyped_storage()._cdata for t in given}
            for storage in (t.untyped_storage() for t in results):
                if storage._cdata not in known:
                    self._live[storage._cdata] = (StorageWeakRef(storage), len(self.events), storage.nbytes())
                    self.events.append((len(self.events), storage.nbytes()))
        self.peak_bytes = max(self.peak_bytes, sum(nbytes for *_, nbytes in self._live.values()))
        return found

    def _give_back(self) -> None:
        gone = [key for key, (storage, *_) in self._live.items() if storage.expired()]
        self.events += [(self._live.pop(key)[1], 0) for key in gone]


def tensors(values) -> list[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        return [values]
    return [t for value in values for t in tensors(value)] if isinstance(values, tuple | list) else []


def fits(events: list[tuple[int, int]], room_bytes: int) -> bool:
    """Tell whether a room holds what `Watch` noted, cut as torch's allocator cuts it.

    Each piece is cut out of the smallest free one that holds it, with what is left over where that is hardly anything;
    what is given back joins its free neighbours. Small pieces lie elsewhere, in segments of 2 MB.
    """
    free, held = [(0, room_bytes)], {}  # (start, end), ascending
    for number, nbytes in events:
        if nbytes > _SMALL_BYTES:
            size = -(-nbytes // _ROUNDED_BYTES) * _ROUNDED_BYTES
            large = [(end - start, start) for start, end in free if end - start >= size]
            if not large:
                return False
            length, start = min(large)
            free.remove((start, start + length))
            if length - size > _SMALL_BYTES:
                insort(free, (start + size, start + length))
                length = size
            held[number] = (start, start + length)
        elif number in held and not nbytes:
            start, end = held.pop(number)
            at = bisect_left(free, (start, end))
            if at < len(free) and free[at][0] == end:
                end = free.pop(at)[1]
            if at and free[at - 1][1] == start:
                start = free.pop(at - 1)[0]
            insort(free, (start, end))
    return True
