"""Run vLLM's linear layer for CPUs, oneDNN over weights that it has reordered once. That is what vLLM takes for
matrices above 1 MiB, with AMX and without."""

from __future__ import annotations

import numpy as np
import torch

from benchmarks.peers.serve import serve
from benchmarks.peers.vllm_operators import as_bf16, load_operators
from benchmarks.support import weight_data as data
from benchmarks.support.weight_data import WeightShape

PRIMITIVE_CACHE_SIZE = 32  # as vllm/model_executor/layers/utils.py asks for


def handlers(shape: WeightShape) -> list[torch.Tensor]:
    found = []
    for number in range(shape.count):
        bits = np.empty((shape.expert_dim, shape.hidden), np.uint16)
        data.fill(bits, number)
        found.append(torch.tensor(torch.ops._C.create_onednn_mm_handler(as_bf16(bits).t(), PRIMITIVE_CACHE_SIZE)))
    return found


class Linear:
    """The layers are run in turn, with the same rows."""

    def __init__(self, shape: WeightShape, layers: list[torch.Tensor], num_rows: int) -> None:
        self._layers = layers
        self._x = as_bf16(data.inputs(num_rows, shape.hidden))
        self._out = torch.empty(num_rows, shape.expert_dim, dtype=torch.bfloat16)

    def prepare(self, num_threads: int) -> None:
        torch.set_num_threads(num_threads)

    def run(self) -> None:
        for layer in self._layers:
            torch.ops._C.onednn_mm(self._out, self._x, None, layer)

    def output(self) -> np.ndarray:
        """Return the last layer's rows."""
        return self._out.float().numpy()


def make(shape: WeightShape) -> dict[str, Linear]:
    layers = handlers(shape)
    return {f"onednn_mm, {num} rows": Linear(shape, layers, num) for num in shape.num_rows}


if __name__ == "__main__":
    serve(load_operators(), WeightShape.from_json, make)
