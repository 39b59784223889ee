"""Run vLLM's paged attention for CPUs, straight from its compiled operators. Layout, alignment and the choice of code
path are those of vLLM's CPU backend."""

from __future__ import annotations

import numpy as np
import torch

from benchmarks.peers.serve import serve
from benchmarks.peers.vllm_operators import as_bf16, load_operators, tile_isa
from benchmarks.support import decode_data as data
from benchmarks.support.decode_data import DecodeShape

BLOCK_SIZES = (32, 128)  # the CPU backend wants multiples of 32; 128 is its default


class Paged:
    def __init__(self, shape: DecodeShape, block_size: int) -> None:
        self.shape, self.block_size = shape, block_size
        tables = data.block_tables(shape, block_size)
        # K and V of a block lie behind each other for each KV head
        size = (int(tables.max()) + 1, shape.num_kv_heads, 2 * block_size, shape.head_dim)
        cache = as_bf16(data.huge_array(size, np.uint16))
        self._k, self._v = cache.chunk(2, dim=2)
        self._isa = tile_isa()
        if shape.head_dim % 32:
            self._isa = "vec16"
        self._tables = torch.from_numpy(np.maximum(tables, 0))
        self._write(tables)
        self._q = as_bf16(data.queries(shape))
        self._out = torch.zeros_like(self._q)
        self._lengths = torch.tensor(shape.lengths, dtype=torch.int32)
        self._starts = torch.arange(len(shape.lengths) + 1, dtype=torch.int32)

    def _write(self, tables: np.ndarray) -> None:
        """Write K and V through vLLM's own operator, which may reorder K for its code path."""
        size = self.block_size
        for seq, k_bits, v_bits in data.sequences(self.shape):
            positions = np.arange(len(k_bits))
            slots = tables[seq, positions // size].astype(np.int64) * size + positions % size
            torch.ops._C.cpu_attn_reshape_and_cache(
                as_bf16(k_bits), as_bf16(v_bits), self._k, self._v, torch.from_numpy(slots), self._isa
            )

    def prepare(self, num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        shape = self.shape
        self._metadata = torch.ops._C.get_scheduler_metadata(
            len(shape.lengths), shape.num_heads, shape.num_kv_heads, shape.head_dim, self._lengths, torch.bfloat16,
            self._starts, True, -1, self._isa, True, None,
        )  # fmt: skip

    def run(self) -> None:
        torch.ops._C.cpu_attention_with_kv_cache(
            self._q, self._k, self._v, self._out, self._starts, self._lengths, self.shape.scale, True, None, -1,
            self._tables, 0.0, self._metadata, None, None,
        )  # fmt: skip

    def output(self) -> np.ndarray:
        return self._out.float().numpy()


def make(shape: DecodeShape) -> dict[str, Paged]:
    return {f"paged, bf16, blocks of {size}": Paged(shape, size) for size in BLOCK_SIZES}


if __name__ == "__main__":
    serve(load_operators(), DecodeShape.from_json, make)
