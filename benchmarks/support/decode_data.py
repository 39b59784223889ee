"""Make the shapes and data of decode attention with numpy only: peers build the same problem in their own environments.

Token n of all sequences together has row n % NUM_ROWS of a small random table for K and V. Each contestant lays these
rows out as its kernel wants them, so that a working set of any size is the same numbers for all.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

import numpy as np

NUM_ROWS = 4099  # a prime, so that no block of tokens starts at a row as another does
KV_ITEM_BYTES = 2
_CHUNK_TOKENS = 16384


@dataclass(frozen=True)
class DecodeShape:
    """One query token for each sequence; query head h uses KV head h // (num_heads // num_kv_heads)."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    lengths: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def token_bytes(self) -> int:
        return 2 * self.num_kv_heads * self.head_dim * KV_ITEM_BYTES

    @property
    def kv_bytes(self) -> int:
        """The bytes that any kernel must read: K and V of every cached token, once."""
        return self.num_tokens * self.token_bytes

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> DecodeShape:
        values = json.loads(text)
        return DecodeShape(**{**values, "lengths": tuple(values["lengths"])})


def ragged_lengths(shortest: int, longest: int, token_bytes: int, working_set_bytes: int) -> tuple[int, ...]:
    """Return uniformly spread lengths, as many as `working_set_bytes` needs."""
    generator = np.random.default_rng(7)
    lengths: list[int] = []
    while sum(lengths) * token_bytes < working_set_bytes:
        lengths.append(int(generator.integers(shortest, longest + 1)))
    return tuple(lengths)


def huge_array(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Return zeros in transparent huge pages where the system grants them: the same footing for every contestant."""
    num_bytes = max(1, prod(shape) * np.dtype(dtype).itemsize)
    # Private, as the harness's host tier is: memory that processes share has huge pages only where /sys says so.
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    array: np.ndarray = np.frombuffer(memory, dtype=dtype, count=prod(shape)).reshape(shape)
    array.fill(0)
    return array


def bf16_bits(values: np.ndarray) -> np.ndarray:
    """Cut float32 values to bfloat16's bits."""
    return (np.ascontiguousarray(values, dtype=np.float32).view(np.uint32) >> 16).astype(np.uint16)


def widen(bits: np.ndarray) -> np.ndarray:
    """Return bfloat16 bits as float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def queries(shape: DecodeShape) -> np.ndarray:
    """Return queries as bfloat16 bits [seqs, heads, head_dim]."""
    generator = np.random.default_rng(11)
    return bf16_bits(generator.standard_normal((len(shape.lengths), shape.num_heads, shape.head_dim)))


def key_value_rows(shape: DecodeShape) -> tuple[np.ndarray, np.ndarray]:
    """Return K and V as bfloat16 bits, each [NUM_ROWS, kv_heads, head_dim]."""
    generator = np.random.default_rng(13)
    size = (NUM_ROWS, shape.num_kv_heads, shape.head_dim)
    return bf16_bits(generator.standard_normal(size)), bf16_bits(generator.standard_normal(size))


def block_tables(shape: DecodeShape, block_size: int) -> np.ndarray:
    """Return int32 [seqs, max_blocks] with blocks in random order, and -1 beyond each sequence's blocks."""
    counts = [-(-length // block_size) for length in shape.lengths]
    order = np.random.default_rng(17).permutation(sum(counts)).astype(np.int32)
    tables = np.full((len(counts), max(counts)), -1, dtype=np.int32)
    starts = np.cumsum([0, *counts])
    for seq, count in enumerate(counts):
        tables[seq, :count] = order[starts[seq] : starts[seq] + count]
    return tables


def fill_paged(
    shape: DecodeShape, tables: np.ndarray, block_size: int, k_cache: np.ndarray, v_cache: np.ndarray
) -> None:
    """Writes all tokens to caches [num_blocks, kv_heads, block_size, head_dim] of bfloat16 bits."""
    k_rows, v_rows = key_value_rows(shape)
    positions = np.concatenate([np.arange(length) for length in shape.lengths])
    owners = np.repeat(np.arange(len(shape.lengths)), shape.lengths)
    blocks, offsets = tables[owners, positions // block_size], positions % block_size
    for start in range(0, shape.num_tokens, _CHUNK_TOKENS):
        part = slice(start, min(start + _CHUNK_TOKENS, shape.num_tokens))
        rows = np.arange(part.start, part.stop) % NUM_ROWS
        k_cache[blocks[part], :, offsets[part]] = k_rows[rows]
        v_cache[blocks[part], :, offsets[part]] = v_rows[rows]


def sequences(shape: DecodeShape) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Yield (index, K, V) of each sequence, as bfloat16 bits [tokens, kv_heads, head_dim]."""
    k_rows, v_rows = key_value_rows(shape)
    start = 0
    for seq, length in enumerate(shape.lengths):
        rows = np.arange(start, start + length) % NUM_ROWS
        yield seq, k_rows[rows], v_rows[rows]
        start += length


def expected(shape: DecodeShape, num_seqs: int) -> np.ndarray:
    """Compute float64 [num_seqs, heads, head_dim]: attention of the first sequences, straight from its definition."""
    q = widen(queries(shape)).astype(np.float64)
    group = shape.num_heads // shape.num_kv_heads
    out = np.zeros((num_seqs, shape.num_heads, shape.head_dim))
    for seq, k_bits, v_bits in sequences(shape):
        if seq == num_seqs:
            break
        k, v = widen(k_bits).astype(np.float64), widen(v_bits).astype(np.float64)
        for head in range(shape.num_heads):
            scores = k[:, head // group] @ q[seq, head] * shape.scale
            weights = np.exp(scores - scores.max())
            out[seq, head] = weights @ v[:, head // group] / weights.sum()
    return out
