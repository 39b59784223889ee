"""Run vLLM's fused layer of experts for CPUs, in one call for all of them. With AMX vLLM takes its tiles, elsewhere its
portable code path."""

from __future__ import annotations

import numpy as np
import torch

from benchmarks.peers.serve import serve
from benchmarks.peers.vllm_operators import as_bf16, load_operators, tile_isa
from benchmarks.support import weight_data as data
from benchmarks.support.decode_data import huge_array
from benchmarks.support.weight_data import WeightShape


class Weights:
    """The weights hold all experts' matrices in vLLM's own order, gate above up."""

    def __init__(self, shape: WeightShape) -> None:
        hidden, dim = shape.hidden, shape.expert_dim
        self.isa = tile_isa()
        self.gate_up = as_bf16(huge_array((shape.count, 2 * dim, hidden), np.uint16))
        self.down = as_bf16(huge_array((shape.count, hidden, dim), np.uint16))
        both, down = np.empty((1, 2 * dim, hidden), np.uint16), np.empty((1, hidden, dim), np.uint16)
        for expert in range(shape.count):
            for number, matrix in enumerate((both[0, :dim], both[0, dim:], down[0])):
                data.fill(matrix, 3 * expert + number)
            for source, packed in ((both, self.gate_up), (down, self.down)):
                torch.ops._C.prepack_moe_weight(as_bf16(source), packed[expert : expert + 1], self.isa)


class Fused:
    """Every expert has the same tokens."""

    def __init__(self, shape: WeightShape, weights: Weights, num_tokens: int) -> None:
        self._weights, self._num_tokens = weights, num_tokens
        self._x = as_bf16(data.inputs(num_tokens, shape.hidden)).repeat(shape.count, 1)
        self._out = torch.empty_like(self._x)
        self._experts = torch.arange(shape.count, dtype=torch.int32).repeat_interleave(num_tokens)[:, None].contiguous()
        self._row_weights = torch.ones(len(self._x), 1)

    def prepare(self, num_threads: int) -> None:
        torch.set_num_threads(num_threads)

    def run(self) -> None:
        torch.ops._C.cpu_fused_moe(
            self._out, self._x, self._weights.gate_up, self._weights.down, None, None, self._row_weights,
            self._experts, False, "silu", self._weights.isa,
        )  # fmt: skip

    def output(self) -> np.ndarray:
        """Return the last expert's rows."""
        return self._out[-self._num_tokens :].float().numpy()


def make(shape: WeightShape) -> dict[str, Fused]:
    weights = Weights(shape)
    return {f"cpu_fused_moe, {num} tokens": Fused(shape, weights, num) for num in shape.num_rows}


if __name__ == "__main__":
    serve(load_operators(), WeightShape.from_json, make)
