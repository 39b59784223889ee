"""Read and write one field of many Python objects in one call, where a loop in Python would take most of the time.

The objects are of one class, in a list or tuple, and the field is one of its __slots__. Torch-free.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kernels._extension import native

Objects = Sequence[Any]  # a list or tuple


def values(objects: Objects, name: str) -> np.ndarray:
    """Return what the field holds: int64 [objects]. Raises TypeError where it is no whole number."""
    found = np.empty(len(objects), np.int64)
    native().field_values(objects, name, _address(found))
    return found


def lengths(objects: Objects, name: str) -> np.ndarray:
    """Return the lengths of the lists that the field holds: int64 [objects]."""
    found = np.empty(len(objects), np.int64)
    native().field_lengths(objects, name, _address(found))
    return found


def joined(lists: list[list[int]], counts: np.ndarray) -> np.ndarray:
    """Return the first `counts` entries of the lists, int64 [lists], one list after another: int64 [entries]. Raises
    IndexError where a list is shorter, and ValueError without a count for each."""
    if counts.shape != (len(lists),) or counts.dtype != np.int64:
        raise ValueError(f"one int64 count for each of {len(lists)} lists, got {counts.dtype} {counts.shape}")
    counts = np.ascontiguousarray(counts)
    found = np.empty(int(counts.sum()), np.int64)
    native().lists_joined(lists, _address(counts), _address(found))
    return found


def last(objects: Objects, name: str) -> np.ndarray:
    """Return the last entries of the lists that the field holds: int64 [objects]. Raises IndexError where one is
    empty."""
    found = np.empty(len(objects), np.int64)
    native().field_last(objects, name, _address(found))
    return found


def assign(objects: Objects, name: str, to: list[Any]) -> None:
    """Write one of the values `to` into each object's field."""
    native().field_assign(objects, name, to)


def append(objects: Objects, name: str, entries: list[Any]) -> None:
    """Append one of the `entries` to the list that each object's field holds."""
    native().field_append(objects, name, entries)


def _address(array: np.ndarray) -> int:
    return int(array.ctypes.data)
