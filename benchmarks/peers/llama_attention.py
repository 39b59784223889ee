"""Run llama.cpp's flash attention for CPUs, as `ggml_flash_attn_ext` in a graph with one node for each sequence.

The libraries are those that `pip install llama-cpp-python` builds for this machine. K and V of a sequence lie together
(llama.cpp has no paging), so no mask is needed; the layouts are llama.cpp's own, token by token with all KV heads, and
head by head, which is easier on memory.
"""

from __future__ import annotations

import ctypes
import importlib.util
from ctypes import c_bool, c_float, c_int, c_int64, c_size_t, c_void_p
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.serve import serve
from benchmarks.support import decode_data as data
from benchmarks.support.decode_data import DecodeShape

F32, F16, BF16 = 0, 1, 30  # enum ggml_type
_SLACK_BYTES = 64 << 20  # graph, tensor headers, queries and outputs


class InitParams(ctypes.Structure):
    _fields_ = [("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool)]


_SIGNATURES: dict[str, tuple[Any, ...]] = {  # result, then arguments
    "ggml_init": (c_void_p, InitParams),
    "ggml_new_tensor_1d": (c_void_p, c_void_p, c_int, c_int64),
    "ggml_view_3d": (c_void_p, c_void_p, c_void_p, *(c_int64,) * 3, *(c_size_t,) * 3),
    "ggml_get_data": (c_void_p, c_void_p),
    "ggml_flash_attn_ext": (c_void_p, *(c_void_p,) * 5, *(c_float,) * 3),
    "ggml_new_graph_custom": (c_void_p, c_void_p, c_size_t, c_bool),
    "ggml_build_forward_expand": (None, c_void_p, c_void_p),
    "ggml_backend_cpu_init": (c_void_p,),
    "ggml_backend_cpu_set_n_threads": (None, c_void_p, c_int),
    "ggml_backend_graph_compute": (c_int, c_void_p, c_void_p),
}


class Ggml:
    """The functions above, found in whichever of ggml's libraries has them."""

    def __init__(self) -> None:
        spec = importlib.util.find_spec("llama_cpp")
        assert spec and spec.submodule_search_locations, "llama_cpp is not installed here"
        folder = Path(spec.submodule_search_locations[0]) / "lib"
        libraries = [ctypes.CDLL(str(folder / f"lib{name}.so")) for name in ("ggml-base", "ggml-cpu", "ggml")]
        for name, (result, *arguments) in _SIGNATURES.items():
            function = next(getattr(library, name) for library in libraries if hasattr(library, name))
            function.restype, function.argtypes = result, arguments
            setattr(self, name.removeprefix("ggml_"), function)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


class Graph:
    def __init__(self, ggml: Ggml, shape: DecodeShape, kv_type: int, heads_apart: bool) -> None:
        self.ggml, self.shape = ggml, shape
        self._memory = data.huge_array((shape.kv_bytes + _SLACK_BYTES,), np.uint8)
        address = self._memory.ctypes.data
        self._context = ggml.init(InitParams(self._memory.nbytes, address, False))
        row = shape.num_kv_heads * shape.head_dim
        self._k, self._v = (
            ggml.new_tensor_1d(self._context, kv_type, c_int64(shape.num_tokens * row)) for _ in range(2)
        )
        self._fill(kv_type, heads_apart)
        q = data.widen(data.queries(shape))
        queries = ggml.new_tensor_1d(self._context, F32, q.size)
        self._array(queries, np.float32, q.size)[:] = q.reshape(-1)
        self._build(queries, heads_apart)
        self._backend = ggml.backend_cpu_init()

    def _array(self, tensor: int, dtype: Any, size: int) -> np.ndarray:
        start = self.ggml.get_data(tensor) - self._memory.ctypes.data
        return self._memory[start : start + size * np.dtype(dtype).itemsize].view(dtype)

    def _fill(self, kv_type: int, heads_apart: bool) -> None:
        size = self.shape.num_tokens * self.shape.num_kv_heads * self.shape.head_dim
        k, v = (self._array(tensor, np.uint16, size) for tensor in (self._k, self._v))
        start = 0
        for _, *both in data.sequences(self.shape):
            for cache, bits in zip((k, v), both, strict=True):
                rows = bits if kv_type == BF16 else data.widen(bits).astype(np.float16).view(np.uint16)
                ordered = rows.transpose(1, 0, 2) if heads_apart else rows
                cache[start : start + rows.size] = ordered.reshape(-1)
            start += rows.size

    def _build(self, queries: int, heads_apart: bool) -> None:
        ggml, shape, dim = self.ggml, self.shape, self.shape.head_dim
        self._graph = ggml.new_graph_custom(self._context, 4 * len(shape.lengths) + 8, False)
        self._results = []
        token = 0
        for seq, length in enumerate(shape.lengths):
            q_bytes = shape.num_heads * dim * 4
            q = ggml.view_3d(self._context, queries, dim, 1, shape.num_heads, q_bytes, dim * 4, seq * q_bytes)
            token_bytes, head_bytes = shape.num_kv_heads * dim * 2, dim * 2
            start_bytes = token * token_bytes
            if heads_apart:
                token_bytes, head_bytes = dim * 2, length * dim * 2
            k, v = (
                ggml.view_3d(self._context, t, dim, length, shape.num_kv_heads, token_bytes, head_bytes, start_bytes)
                for t in (self._k, self._v)
            )
            result = ggml.flash_attn_ext(self._context, q, k, v, None, shape.scale, 0.0, 0.0)
            ggml.build_forward_expand(self._graph, result)
            self._results.append(result)
            token += length

    def prepare(self, num_threads: int) -> None:
        self.ggml.backend_cpu_set_n_threads(self._backend, num_threads)

    def run(self) -> None:
        status = self.ggml.backend_graph_compute(self._backend, self._graph)
        assert status == 0, f"ggml_backend_graph_compute returned {status}"

    def output(self) -> np.ndarray:
        shape = self.shape
        size = shape.num_heads * shape.head_dim
        rows = [self._array(result, np.float32, size) for result in self._results]
        return np.stack(rows).reshape(len(shape.lengths), shape.num_heads, shape.head_dim)


def make(shape: DecodeShape) -> dict[str, Graph]:
    ggml = Ggml()
    return {
        "flash, f16": Graph(ggml, shape, F16, heads_apart=False),
        "flash, f16, head by head": Graph(ggml, shape, F16, heads_apart=True),
        "flash, bf16, head by head": Graph(ggml, shape, BF16, heads_apart=True),
    }


if __name__ == "__main__":
    serve(f"llama-cpp-python {version('llama-cpp-python')}", DecodeShape.from_json, make)
