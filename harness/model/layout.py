"""Lay out a layer's weights in memory: named tensors in parts, in the order of first use. Torch-free.

A *part* is the unit that is transferred, waited for and addressed on its own: the dense tensors in front of attention,
those behind it, and each expert. A family lists its parts; the host store lays all layers out one after another, so
that consecutive parts are contiguous in host memory (MoE-Lens §6.5).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from math import prod
from typing import Any

from harness.model.spec import DTYPE_BYTES

ALIGNMENT_BYTES = 64  # one cache line; also the alignment that suits AVX-512 loads and non-temporal stores


@dataclass(frozen=True, slots=True)
class Section:
    """The units from `start` to `stop` of a dimension that has `of` equal ones. The units are neighbours; where it is
    interleaved, they are one entry of each `of`."""

    start: int
    stop: int
    of: int
    interleaved: bool = False

    def entries(self, size: int) -> range | None:
        """Return which entries of a dimension these are; None where it has no such units."""
        if size % self.of or not 0 <= self.start < self.stop <= self.of:
            return None
        if self.interleaved:
            return range(self.start, size, self.of)
        return range(self.start * size // self.of, self.stop * size // self.of)


@dataclass(frozen=True, slots=True)
class RowsOfEach:
    """The rows from `start` to `stop` of each block of `size` rows, such as the values' in each head's projection."""

    start: int
    stop: int
    size: int


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """A part of a checkpoint tensor. `index` has for each leading dimension one entry, which drops the dimension, or a
    section; the last two dimensions are swapped where it is `transposed`. `rows_of_each` is applied first."""

    index: tuple[int | Section, ...] = ()
    transposed: bool = False
    rows_of_each: RowsOfEach | None = None

    def of(self, tensor: Any) -> Any:
        """Return this part of a torch tensor; if a mapped file holds the tensor, nothing else of it is read. It is a
        view, but for `rows_of_each`."""
        if (each := self.rows_of_each) is not None:
            tensor = tensor[()].unflatten(0, (-1, each.size))[:, each.start : each.stop].flatten(0, 1)
        at: list[int | slice] = []
        for entry, size in zip(self.index, tensor.shape, strict=False):
            found = entry if isinstance(entry, int) else entry.entries(size)
            assert found is not None, "checked by `shape_of`"
            at.append(found if isinstance(found, int) else slice(found.start, found.stop, found.step))
        view = tensor[tuple(at)]
        return view.transpose(-1, -2) if self.transposed else view

    def shape_of(self, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        """Return the shape that `of` gives for a tensor of this shape; None where the tensor has no such part."""
        if len(self.index) > len(shape):
            return None
        if (each := self.rows_of_each) is not None:
            if not shape or shape[0] % each.size:
                return None
            shape = (shape[0] // each.size * (each.stop - each.start), *shape[1:])
        found: list[int] = []
        for entry, size in zip(self.index, shape, strict=False):
            if isinstance(entry, int):
                if not 0 <= entry < size:
                    return None
            elif (entries := entry.entries(size)) is None:
                return None
            else:
                found.append(len(entries))
        found += shape[len(self.index) :]
        if self.transposed:
            found[-2:] = reversed(found[-2:])
        return tuple(found)


@dataclass(frozen=True, slots=True)
class TensorSource:
    """One tensor as a family asks for it: local name, shape, and the checkpoint tensors that dim 0 stacks.

    `rows` says how many rows each of these has here; empty where they share dim 0 as they do in the checkpoint.
    `slices` says which part of each is meant; empty: all of it. `dtype` is the tensor's own; None: that of its part.
    `added_once` marks a bias of results that several GPUs add up: the first GPU has it, the others have zeros.
    """

    name: str
    shape: tuple[int, ...]
    checkpoint_names: tuple[str, ...]
    rows: tuple[int, ...] = ()
    slices: tuple[TensorSlice, ...] = ()
    dtype: str | None = None
    added_once: bool = False


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """One tensor in its part: `nbytes` of `dtype` from `offset_bytes` on; the other fields are as in `TensorSource`."""

    name: str
    shape: tuple[int, ...]
    checkpoint_names: tuple[str, ...]
    offset_bytes: int
    nbytes: int
    dtype: str
    rows: tuple[int, ...] = ()
    slices: tuple[TensorSlice, ...] = ()
    added_once: bool = False

    @property
    def pieces(self) -> tuple[tuple[str, TensorSlice], ...]:
        """The checkpoint tensors that dim 0 stacks, each with the slice that is taken of it."""
        return tuple(
            zip(self.checkpoint_names, self.slices or [TensorSlice()] * len(self.checkpoint_names), strict=True)
        )


@dataclass(frozen=True, slots=True)
class PartLayout:
    """The tensors of a part lie at fixed offsets in one contiguous, aligned region of `nbytes`.

    `expert` is the number of the routed expert whose weights these are; None for parts that every token uses. Parts
    with the same `form` have tensors of the same names, shapes and dtypes at the same offsets, as a layer's experts do.
    """

    name: str
    tensors: tuple[TensorLayout, ...]
    nbytes: int
    expert: int | None = None
    form: object = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        tensors = tuple((t.name, t.shape, t.offset_bytes, t.nbytes, t.dtype) for t in self.tensors)
        object.__setattr__(self, "form", _form(self.nbytes, tensors))


@cache
def _form(nbytes: int, tensors: tuple[tuple[Any, ...], ...]) -> object:
    """Return what stands for a form: one object for equal ones, which is looked up faster than they are compared."""
    return object()


def lay_out(name: str, dtype: str, sources: Iterable[TensorSource], *, expert: int | None = None) -> PartLayout:
    """Place the sources one after another, each aligned, in `dtype` or, where a source has a dtype of its own, in
    that."""
    tensors, offset_bytes = [], 0
    for source in sources:
        own = source.dtype or dtype
        nbytes = prod(source.shape) * DTYPE_BYTES[own]
        tensors.append(
            TensorLayout(
                source.name,
                source.shape,
                source.checkpoint_names,
                offset_bytes,
                nbytes,
                own,
                source.rows,
                source.slices,
                source.added_once,
            )
        )
        offset_bytes += -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return PartLayout(name, tuple(tensors), offset_bytes, expert)
