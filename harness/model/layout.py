"""How a layer's weights lie in memory: named tensors in parts, in the order of first use. Torch-free.

A *part* is the unit that is transferred, waited for and addressed on its own: the dense tensors in front of attention,
those behind it, and each expert. A family lists its parts; the host store lays all layers out one after another, so
that consecutive parts are contiguous in host memory (MoE-Lens §6.5).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from harness.model.spec import DTYPE_BYTES

ALIGNMENT_BYTES = 64  # one cache line; also what AVX-512 loads and non-temporal stores like


@dataclass(frozen=True, slots=True)
class TensorSource:
    """One tensor as a family asks for it: local name, shape, and the checkpoint tensors that dim 0 stacks.

    `rows` says how many rows each of these has here; empty where they share dim 0 as they do in the checkpoint.
    """

    name: str
    shape: tuple[int, ...]
    checkpoint_names: tuple[str, ...]
    rows: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class TensorLayout:
    name: str
    shape: tuple[int, ...]
    checkpoint_names: tuple[str, ...]
    offset_bytes: int
    nbytes: int
    rows: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PartLayout:
    """Tensors at fixed offsets in one contiguous, aligned region of `nbytes`; all of one `dtype`.

    `expert` is the number of the routed expert whose weights these are; None for parts that every token uses.
    """

    name: str
    dtype: str
    tensors: tuple[TensorLayout, ...]
    nbytes: int
    expert: int | None = None


def lay_out(name: str, dtype: str, sources: Iterable[TensorSource], *, expert: int | None = None) -> PartLayout:
    """Place the sources one after another, each aligned."""
    tensors, offset_bytes = [], 0
    for source in sources:
        nbytes = prod(source.shape) * DTYPE_BYTES[dtype]
        tensors.append(
            TensorLayout(source.name, source.shape, source.checkpoint_names, offset_bytes, nbytes, source.rows)
        )
        offset_bytes += -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return PartLayout(name, dtype, tuple(tensors), offset_bytes, expert)
