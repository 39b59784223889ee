"""Decode attention in torch: two bfloat16 matmuls round a softmax, the heads of a group as query rows.

Both variants get more than the paged kernels do: K and V of each sequence lie together in memory.
"""

from __future__ import annotations

import numpy as np
import torch

from benchmarks.support import decode_data as data
from benchmarks.support.decode_data import DecodeShape
from benchmarks.support.paged_attention import as_bf16
from benchmarks.support.stopwatch import Stopwatch
from benchmarks.support.torch_threads import with_threads

_BUCKET_SEQS = 16


class TorchAttention:
    def __init__(self, shape: DecodeShape) -> None:
        self.shape = shape
        self._q = as_bf16(data.queries(shape))
        self.out = torch.zeros(self._q.shape, dtype=torch.bfloat16)
        self._order = sorted(range(len(shape.lengths)), key=lambda seq: shape.lengths[seq])
        self._seqs: list[tuple[torch.Tensor, torch.Tensor]] = [(torch.empty(0),) * 2] * len(shape.lengths)
        self._buckets = [self._empty_bucket(seqs) for seqs in self._bucket_seqs()]
        homes = {seq: divmod(i, _BUCKET_SEQS) for i, seq in enumerate(self._order)}
        for seq, k_bits, v_bits in data.sequences(shape):
            bucket, row = homes[seq]
            views = []
            for cache, bits in zip(self._buckets[bucket][:2], (k_bits, v_bits), strict=True):
                view = cache[row, :, : len(bits)]  # [kv_heads, tokens, head_dim]
                view.copy_(as_bf16(bits).transpose(0, 1))
                views.append(view)
            self._seqs[seq] = (views[0], views[1])

    def _bucket_seqs(self) -> list[list[int]]:
        return [self._order[i : i + _BUCKET_SEQS] for i in range(0, len(self._order), _BUCKET_SEQS)]

    def _empty_bucket(self, seqs: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Allocate K, V [seqs, kv_heads, tokens, head_dim], padded; mask [seqs, 1, 1, tokens]; and the sequences'
        indices."""
        lengths = torch.tensor([self.shape.lengths[seq] for seq in seqs])
        size = (len(seqs), self.shape.num_kv_heads, int(lengths.max()), self.shape.head_dim)
        k, v = (as_bf16(data.huge_array(size, np.uint16)) for _ in range(2))
        beyond = torch.arange(size[2]) >= lengths[:, None]
        mask = torch.zeros(beyond.shape, dtype=torch.bfloat16).masked_fill_(beyond, -torch.inf)
        return k, v, mask[:, None, None], torch.tensor(seqs)

    def _grouped(self, q: torch.Tensor) -> torch.Tensor:
        """View [..., heads, head_dim] as [..., kv_heads, group, head_dim]."""
        return q.unflatten(-2, (self.shape.num_kv_heads, -1))

    def one_by_one(self) -> None:
        q = self._grouped(self._q * self.shape.scale)
        out = self._grouped(self.out)
        for seq, (k, v) in enumerate(self._seqs):
            out[seq] = torch.softmax(q[seq] @ k.mT, -1) @ v

    def in_buckets(self) -> None:
        q = self._grouped(self._q * self.shape.scale)
        out = self._grouped(self.out)
        for k, v, mask, seqs in self._buckets:
            out[seqs] = torch.softmax((q[seqs] @ k.mT).add_(mask), -1) @ v

    def contestants(self, num_threads: int) -> dict[str, Stopwatch]:
        return {
            "torch, sequence by sequence": with_threads(self.one_by_one, num_threads),
            "torch, 16 sequences padded": with_threads(self.in_buckets, num_threads),
        }
