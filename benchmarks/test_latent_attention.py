"""Measure latent (MLA) attention over compressed KV, against the read and GEMM ceilings and torch.

All heads share one compressed row a token, so that work for each byte grows with the heads: with DeepSeek-V2-Lite's 16
it is arithmetic, not memory, that limits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.conftest import Scale
from benchmarks.support.decode_data import DecodeShape, block_tables, huge_array, ragged_lengths
from benchmarks.support.paged_attention import as_bf16
from benchmarks.support.rounds import Rounds
from benchmarks.support.torch_threads import with_threads
from kernels import latent_attention
from kernels.reference import gather_cache, softmax

NUM_HEADS, LATENT_DIM, ROPE_DIM, BLOCK_SIZE = 16, 512, 64, 16  # DeepSeek-V2-Lite, Moonlight
ROW_DIM = LATENT_DIM + ROPE_DIM
SCALE = 192**-0.5  # of the uncompressed head: 128 without rope and 64 with it


class Latent:
    def __init__(self, working_set_bytes: int) -> None:
        lengths = ragged_lengths(100, 700, ROW_DIM * 2, working_set_bytes)
        self.lengths = torch.tensor(lengths, dtype=torch.int32)
        tables = block_tables(DecodeShape("", NUM_HEADS, 1, ROW_DIM, lengths), BLOCK_SIZE)
        self.tables = torch.from_numpy(tables)
        self.cache = as_bf16(huge_array((int(tables.max()) + 1, BLOCK_SIZE, ROW_DIM), np.uint16))
        generator = torch.Generator().manual_seed(23)
        some = torch.randn(1021, BLOCK_SIZE, ROW_DIM, generator=generator).bfloat16()
        for start in range(0, len(self.cache), len(some)):
            part = self.cache[start : start + len(some)]
            part.copy_(some[: len(part)])
        self.q = torch.randn(len(lengths), NUM_HEADS, ROW_DIM, generator=generator).bfloat16() / 4
        self.out = torch.zeros(len(lengths), NUM_HEADS, LATENT_DIM)

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())

    def ours(self, num_threads: int) -> Callable[[], None]:
        arguments = (self.q, self.cache, self.tables, self.lengths, self.out)
        return lambda: latent_attention(*arguments, scale=SCALE, num_threads=num_threads)

    def by_torch(self) -> Callable[[], None]:
        """Attend with torch to a sequence's rows that lie together, unlike ours: the cache is read as if it were not
        paged."""
        rows = self.cache.reshape(-1, ROW_DIM)
        out = torch.empty(self.out.shape, dtype=torch.bfloat16)
        starts = torch.cumsum(self.lengths, 0) - self.lengths
        spans = list(zip(starts.tolist(), self.lengths.tolist(), strict=True))

        def run() -> None:
            q = self.q * SCALE
            for seq, (start, length) in enumerate(spans):
                keys = rows[start : start + length]
                out[seq] = torch.softmax(q[seq] @ keys.T, -1) @ keys[:, :LATENT_DIM]

        return run

    def expected(self, seq: int) -> np.ndarray:
        """Compute float64 [heads, latent_dim]."""
        rows = gather_cache(self.cache[:, None], self.tables[seq], int(self.lengths[seq]))[:, 0]
        return softmax(self.q[seq].double().numpy() @ rows.T * SCALE) @ rows[:, :LATENT_DIM]


@pytest.fixture(scope="module")
def latent(scale: Scale) -> Latent:
    return Latent(scale.working_set_bytes)


def test_latent_attention(
    benchmark: Any, report: Any, ceilings: Any, latent: Latent, scale: Scale, num_threads: int
) -> None:
    others = {
        "read ceiling": ceilings.read(num_threads),
        "GEMM ceiling": ceilings.gemm(num_threads),
        "torch": with_threads(latent.by_torch(), num_threads),
    }
    rounds = Rounds("ours", latent.ours(num_threads), others, num_threads)
    rounds.measure(benchmark, scale.num_rounds)
    seconds, num_tokens = rounds.median_s("ours"), latent.num_tokens
    kv_bytes, flops = num_tokens * ROW_DIM * 2, 2 * num_tokens * NUM_HEADS * (ROW_DIM + LATENT_DIM)
    report(
        rounds,
        kernel="latent_attention",
        shape=f"{NUM_HEADS} heads",
        num_threads=num_threads,
        kv_bytes=kv_bytes,
        kv_tokens_s=num_tokens / seconds,
        gb_s=kv_bytes / seconds / 1e9,
        gflop_s=flops / seconds / 1e9,
        flops_per_byte=flops / kv_bytes,
        read_ceiling_gb_s=ceilings.num_bytes / rounds.median_s("read ceiling") / 1e9,
        gemm_ceiling_gflop_s=ceilings.gemm_flops() / rounds.median_s("GEMM ceiling") / 1e9,
        share_of_ceiling=rounds.ratio("read ceiling", "ours") * kv_bytes / ceilings.num_bytes,
        share_of_gemm=rounds.ratio("GEMM ceiling", "ours") * flops / ceilings.gemm_flops(),
        times_faster_than={"torch": rounds.ratio("torch", "ours")},
    )
    np.testing.assert_allclose(latent.out[0].numpy(), latent.expected(0), rtol=0, atol=1e-4)
