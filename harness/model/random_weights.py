"""Make random weights of any size straight in the host store, without a checkpoint: for measuring, not for tokens.

A block of uniform numbers is laid end to end over a part's matrices, starting at another place for each part, so that
94 GB take seconds. Scales are those of the random checkpoints (`zoo.py`): 1 / sqrt(hidden), embeddings 1, norms spread
about 1, other vectors about 0.
"""

from __future__ import annotations

import zlib
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from typing import Any

import torch

from harness.model import families
from harness.model.checkpoint import part_views
from harness.model.config import ModelConfig
from harness.model.layout import PartLayout
from harness.model.planned import planned_model
from harness.model.recipe import NORM_STD
from harness.model.sharding import shard_spec
from kernels.cpu import num_cores

_BLOCK_NUMBERS = 33_554_393  # a prime: rows of matrices do not repeat
_PIECE_NUMBERS = 1 << 23  # the numbers that a thread copies at once
_COMPARED_NUMBERS = 64


class RandomWeights:
    """A `WeightStore` reads from these instead of a checkpoint. The same seed gives the same weights."""

    def __init__(self, config: ModelConfig, *, seed: int = 0, threads: int | None = None) -> None:
        """Take the dimensions from `config`. Raises ConfigError where `config` names no dimensions, or a family that
        cannot be run."""
        self.spec = planned_model(config).spec
        self.family = families.family(self.spec.family)
        generator = torch.Generator().manual_seed(seed)
        dtype = getattr(torch, self.spec.dtype)
        uniform = torch.rand(min(_BLOCK_NUMBERS, int(self.spec.model_bytes)), generator=generator)
        std = self.spec.hidden_dim**-0.5
        self._block = uniform.sub_(0.5).mul_(std * 12**0.5).to(dtype)  # width 1 has variance 1/12
        self._std = std
        self._threads = threads or min(8, num_cores())

    def shard(self, rank: int, num_ranks: int) -> RandomWeights:
        """Return the share of GPU `rank` of `num_ranks`. Parts that all GPUs hold whole, such as the router, are equal
        on all. Their shares of the other parts are equal too, which no real model has. Raises ConfigError where the
        model cannot be divided."""
        share = copy(self)
        share.spec = shard_spec(self.spec, num_ranks)
        return share

    def read_part(self, layer: int | None, part: PartLayout, out: Any) -> None:
        """Fill `out`, uint8 [part.nbytes] on the CPU. Matrices that are already there, in memory that one run leaves to
        the next, are not written again: 94 GB take longer to write than a pass takes."""
        scale = 1 / self._std if part.name == self.family.embedding_part(self.spec).name else 1.0
        for tensor in part.tensors:
            view = part_views(part, out)[tensor.name].view(-1)
            start = zlib.crc32(f"{layer} {part.name} {tensor.name}".encode())
            if len(tensor.shape) == 1:
                self._fill(view, start)
                view.mul_(NORM_STD / self._std).add_(float(tensor.name.endswith("norm")))  # else biases, sinks
            elif not self._is_there(view, start, scale):
                self._tile(view, start)
                if scale != 1.0:
                    view.mul_(scale)

    def _is_there(self, target: torch.Tensor, start: int, scale: float) -> bool:
        """Tell whether a tensor is already written, judging by both ends of each piece: one thread writes a piece, from
        its beginning to its end."""
        for first in range(0, target.numel(), _PIECE_NUMBERS):
            end = min(first + _PIECE_NUMBERS, target.numel())
            expected = torch.empty(min(_COMPARED_NUMBERS, end - first), dtype=target.dtype)
            for at in (first, end - expected.numel()):
                self._fill(expected, start + at)
                if not torch.equal(target[at : at + expected.numel()], expected.mul_(scale)):
                    return False
        return True

    def _tile(self, target: torch.Tensor, start: int) -> None:
        with ThreadPoolExecutor(self._threads) as pool:
            pieces = range(0, target.numel(), _PIECE_NUMBERS)
            list(pool.map(lambda at: self._fill(target[at : at + _PIECE_NUMBERS], start + at), pieces))

    def _fill(self, piece: torch.Tensor, start: int) -> None:
        """Fill a piece from number `start` of the endless repetition of the block on."""
        done, size = 0, self._block.numel()
        while done < piece.numel():
            at = (start + done) % size
            count = min(piece.numel() - done, size - at)
            piece[done : done + count].copy_(self._block[at : at + count])
            done += count
