"""Check tensor arguments, as in `check.cpu("q", q, 3)`: each check raises a `ValueError` that names the argument.

They stand between Python and raw addresses, so they must be complete. One call's take 5 to 15 microseconds: a kernel
asks the test that `quick` made first, which takes one or two, and then only where that cannot tell.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from kernels._extension import native

BFLOAT16, FLOAT16, FLOAT32, INT32, INT64 = torch.bfloat16, torch.float16, torch.float32, torch.int32, torch.int64
# The numbers are those of csrc/core/types.h and, from 3 on, of csrc/bindings/bindings.h.
DTYPE_CODES = {BFLOAT16: 0, FLOAT16: 1, FLOAT32: 2, INT32: 3, INT64: 4}
FLOATS, WEIGHTS, SLOTS = (BFLOAT16, FLOAT16, FLOAT32), (BFLOAT16, FLOAT16), (INT32, INT64)
_FLOAT_NAMES = "bfloat16, float16 or float32"


Found = tuple[tuple[int, ...], tuple[int, ...]]
Quick = Callable[..., Found | None]


class Expected(NamedTuple):
    """Says for `quick` what a call's tensor must be, besides in its storage on the CPU, with contiguous rows."""

    dims: str  # a letter each, the same for the same size; upper case: not 0
    dtypes: tuple[torch.dtype, ...] = ()
    like: str = ""  # or the dtype of this tensor, which is named before
    contiguous: bool = False  # from row to row too
    written: bool = False  # overlaps no other; only the rows of two that are written may alternate
    optional: bool = False  # may be None; others have its sizes


def quick(**tensors: Expected) -> Quick:
    """Make the test that tells at once of nearly every call whether its tensors are good.

    It is given the tensors in this order. It returns None where it cannot tell: the checks below then explain what is
    wrong, or accept what it does not know. Else it returns the sizes, in the order of their letters, and all places:
    the addresses (0 for None), the codes of dtypes where there is a choice, and the strides of what need not be
    contiguous. With an older torch, which lacks DLPack's C exchange API, it can never tell.
    """
    names = list(tensors)
    return native().quick_test(
        [
            (
                *(each.dims, sum(1 << DTYPE_CODES[dtype] for dtype in each.dtypes)),
                *(names.index(each.like) if each.like else -1, each.contiguous, each.written, each.optional),
            )
            for each in tensors.values()
        ]
    )


def cpu(name: str, tensor: torch.Tensor, num_dims: int) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(tensor).__name__}")
    if not tensor.is_cpu:
        raise ValueError(f"{name}: expected a CPU tensor, got one on {tensor.device}")
    if tensor.is_neg() or tensor.is_conj():  # memory then holds other values than the tensor has
        raise ValueError(f"{name}: expected values as they lie in memory; resolve_neg() and resolve_conj() give them")
    if tensor.dim() != num_dims:
        raise ValueError(f"{name}: expected {num_dims} dimensions, got shape {tuple(tensor.shape)}")


def float_code(name: str, tensor: torch.Tensor) -> int:
    if tensor.dtype not in FLOATS:
        raise ValueError(f"{name}: expected {_FLOAT_NAMES}, got {tensor.dtype}")
    return DTYPE_CODES[tensor.dtype]


def weight_code(name: str, tensor: torch.Tensor) -> int:
    """Return the extension's code of the type of weights, which products read in place."""
    if tensor.dtype not in WEIGHTS:
        raise ValueError(f"{name}: expected bfloat16 or float16, got {tensor.dtype}")
    return DTYPE_CODES[tensor.dtype]


def sum_code(name: str, tensor: torch.Tensor, weight: torch.Tensor) -> int:
    """Return the extension's code of the tensor's type, which must be one that products with `weight` take and give."""
    if tensor.dtype is not weight.dtype and tensor.dtype is not torch.float32:
        raise ValueError(f"{name}: expected {weight.dtype} as the weights or float32, got {tensor.dtype}")
    return DTYPE_CODES[tensor.dtype]


def dtype(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
    if tensor.dtype is not dtype:
        raise ValueError(f"{name}: expected {dtype}, got {tensor.dtype}")


def shape(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape:
        raise ValueError(f"{name}: expected shape {shape}, got {tuple(tensor.shape)}")


def rows(name: str, tensor: torch.Tensor) -> int:
    """Check that all dimensions but the first are contiguous, and return the first dimension's stride in elements."""
    if tensor.is_contiguous():
        return tensor.numel() // (tensor.shape[0] or 1)
    shape, strides = tensor.shape, tensor.stride()
    num_elements = 1
    for size, stride in zip(shape[:0:-1], strides[:0:-1], strict=True):
        if stride != num_elements and size > 1:
            raise ValueError(f"{name}: all dimensions but the first must be contiguous, got strides {strides}")
        num_elements *= size
    if strides[0] < num_elements:
        raise ValueError(f"{name}: rows overlap: stride {strides[0]} for rows of {num_elements} elements")
    return strides[0]


def contiguous(name: str, tensor: torch.Tensor) -> None:
    if not tensor.is_contiguous():
        raise ValueError(f"{name}: expected a contiguous tensor, got strides {tensor.stride()}")


Span = tuple[int, int]  # [start, end) addresses


def spans(**tensors: torch.Tensor) -> dict[str, Span]:
    """Return where tensors lie that `rows` accepted. Refuses a storage that was freed or shrunk under its tensor, so
    every tensor whose address goes to C++ must pass through here."""
    return {name: _span(name, tensor) for name, tensor in tensors.items()}


def _span(name: str, tensor: torch.Tensor) -> Span:
    if tensor.is_contiguous():
        num_bytes = tensor.nbytes
    else:
        num_rows = tensor.shape[0]  # not contiguous, hence not empty
        num_bytes = ((num_rows - 1) * tensor.stride(0) + tensor.numel() // num_rows) * tensor.itemsize
    held_bytes, offset = tensor.untyped_storage().nbytes(), tensor.storage_offset()
    if num_bytes > (held_bytes - offset * tensor.itemsize if offset else held_bytes) and num_bytes:
        raise ValueError(f"{name}: reaches beyond its storage, which was freed or resized to {held_bytes} bytes")
    start = tensor.data_ptr()
    return start, start + num_bytes


def places(
    tensors: dict[str, torch.Tensor | None], codes: tuple[int, ...], *, contiguous: tuple[str, ...] = ()
) -> tuple[int, ...]:
    """Return what `quick` does of where tensors lie, after the checks of that: nothing may overlap `out`."""
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    strides = [rows(name, tensor) for name, tensor in given.items() if name not in contiguous]
    lie = spans(**given)
    disjoint("out", lie)
    return (*[lie[name][0] if name in lie else 0 for name in tensors], *codes, *strides)


class Memory:
    """The places of tensors that passed `spans`, for quick looks whether they are still there."""

    __slots__ = ("_places", "_tensors")

    def __init__(self, **tensors: torch.Tensor) -> None:
        self._tensors = tensors
        by_storage = {tensor.untyped_storage()._cdata: tensor for tensor in tensors.values()}
        storages = [(tensor.untyped_storage(), tensor) for tensor in by_storage.values()]
        self._places = [(storage, storage.nbytes(), tensor, tensor.data_ptr()) for storage, tensor in storages]

    def require(self) -> None:
        """Raise ValueError, naming a tensor, where a storage was freed or resized since."""
        for storage, num_bytes, tensor, address in self._places:
            if storage.nbytes() != num_bytes or tensor.data_ptr() != address:
                spans(**self._tensors)
                raise ValueError(f"{next(iter(self._tensors))}: its memory is another since it was checked")


def disjoint(name: str, spans: dict[str, Span], *others: str) -> None:
    """Check that none of the tensors `others` lies where `name` does; without `others`, none of all in `spans`."""
    start, end = spans[name]
    for other_name in others or spans:
        other_start, other_end = spans[other_name]
        if start < other_end and other_start < end and other_name != name:
            raise ValueError(f"{name}: overlaps {other_name} in memory")


def disjoint_rows(name: str, tensor: torch.Tensor, other_name: str, other: torch.Tensor) -> None:
    """Check two tensors of one shape and dtype that `rows` accepted, whose rows may alternate at a common stride."""
    (start, end), (other_start, other_end) = _span(name, tensor), _span(other_name, other)
    if start >= other_end or other_start >= end:
        return
    stride, other_stride = rows(name, tensor), rows(other_name, other)
    stride_bytes = stride * tensor.element_size()
    row_bytes = tensor.nbytes // tensor.shape[0]  # overlapping, hence not empty
    offset_bytes = (start - other_start) % stride_bytes
    if stride != other_stride or not row_bytes <= offset_bytes <= stride_bytes - row_bytes:
        raise ValueError(f"{name}: overlaps {other_name} in memory")
