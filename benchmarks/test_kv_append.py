"""Measure writing to the paged cache and gathering sequences out of it, against the copy ceiling.

Prefill appends whole sequences; decoding one token to each sequence, whose rows lie far apart.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.conftest import Scale
from benchmarks.support.decode_data import huge_array
from benchmarks.support.paged_attention import as_bf16
from benchmarks.support.rounds import Rounds
from benchmarks.support.stopwatch import stopwatch
from benchmarks.support.torch_threads import with_threads
from kernels import kv_append, kv_gather

NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 8, 128, 16
TOKEN_BYTES = 2 * NUM_KV_HEADS * HEAD_DIM * 2  # K and V


def make_slots(pattern: str, num_tokens: int) -> torch.Tensor:
    """Make slots of blocks in random order: filled one after the other, or one token of each at a time."""
    blocks = torch.randperm(num_tokens // BLOCK_SIZE, generator=torch.Generator().manual_seed(3))
    slots = blocks[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)
    return (slots if pattern == "prefill" else slots.T).reshape(-1)


class Append:
    """Half of the working set is new K and V, half is the cache."""

    def __init__(self, working_set_bytes: int, pattern: str) -> None:
        self.num_tokens = working_set_bytes // 2 // TOKEN_BYTES // BLOCK_SIZE * BLOCK_SIZE
        row = (NUM_KV_HEADS, HEAD_DIM)
        self.k, self.v = (as_bf16(huge_array((self.num_tokens, *row), np.uint16)) for _ in range(2))
        cache = (self.num_tokens // BLOCK_SIZE, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)
        self.k_cache, self.v_cache = (as_bf16(huge_array(cache, np.uint16)) for _ in range(2))
        self.k.view(torch.int16).random_(0, 1 << 14)
        self.v.copy_(-self.k)
        self.slots = make_slots(pattern, self.num_tokens)

    def run(self, num_threads: int = 1) -> None:
        kv_append(self.k, self.v, self.k_cache, self.v_cache, self.slots, num_threads=num_threads)

    def by_torch(self) -> Callable[[], None]:
        blocks, offsets = self.slots // BLOCK_SIZE, self.slots % BLOCK_SIZE

        def run() -> None:
            self.k_cache[blocks, :, offsets] = self.k
            self.v_cache[blocks, :, offsets] = self.v

        return run


@pytest.mark.parametrize("pattern", ["prefill", "decode"])
def test_kv_append(benchmark: Any, report: Any, ceilings: Any, scale: Scale, pattern: str, num_threads: int) -> None:
    append = Append(scale.working_set_bytes, pattern)
    torch_run = with_threads(append.by_torch(), num_threads)
    others = {"copy ceiling": ceilings.copy(num_threads), "torch index_put": torch_run}
    rounds = Rounds("ours", lambda: append.run(num_threads), others, num_threads)
    rounds.measure(benchmark, scale.num_rounds)
    seconds = rounds.median_s("ours")
    copied_bytes = append.num_tokens * TOKEN_BYTES
    report(
        rounds,
        kernel="kv_append",
        shape=pattern,
        num_threads=num_threads,
        kv_bytes=copied_bytes,
        kv_tokens_s=append.num_tokens / seconds,
        gb_s=copied_bytes / seconds / 1e9,
        copy_ceiling_gb_s=ceilings.num_bytes / rounds.median_s("copy ceiling") / 1e9,
        share_of_ceiling=rounds.ratio("copy ceiling", "ours") * copied_bytes / ceilings.num_bytes,
        times_faster_than={"torch index_put": rounds.ratio("torch index_put", "ours")},
    )
    append.k_cache.zero_()
    append.run()
    expected = append.k[::97]
    slots = append.slots[::97]
    assert torch.equal(append.k_cache[slots // BLOCK_SIZE, :, slots % BLOCK_SIZE], expected)


class Gather:
    """Half of the working set is the cache, half is what is gathered out of it."""

    SEQUENCE_TOKENS = 512

    def __init__(self, working_set_bytes: int) -> None:
        self.num_tokens = working_set_bytes // 2 // TOKEN_BYTES // self.SEQUENCE_TOKENS * self.SEQUENCE_TOKENS
        num_blocks = self.num_tokens // BLOCK_SIZE
        cache = (num_blocks, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)
        self.caches = [as_bf16(huge_array(cache, np.uint16)) for _ in range(2)]
        for each in self.caches:
            each.view(torch.int16).random_(0, 1 << 14)
        self.out = as_bf16(huge_array((self.num_tokens * TOKEN_BYTES // 2,), np.uint16))
        order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(3)).int()
        self.tables = order.view(-1, self.SEQUENCE_TOKENS // BLOCK_SIZE)
        self.lengths = torch.full((len(self.tables),), self.SEQUENCE_TOKENS, dtype=torch.int32)

    def run(self) -> None:
        kv_gather(self.caches, self.tables, self.lengths, self.out)

    def by_torch(self) -> None:
        """Gather sequence by sequence."""
        pieces = self.out.view(len(self.tables), 2, NUM_KV_HEADS, self.SEQUENCE_TOKENS, HEAD_DIM)
        for table, piece in zip(self.tables, pieces, strict=True):
            for cache, target in zip(self.caches, piece, strict=True):
                target.copy_(cache[table].transpose(0, 1).flatten(1, 2))


def test_kv_gather(benchmark: Any, report: Any, ceilings: Any, scale: Scale) -> None:
    gather = Gather(scale.working_set_bytes)
    torch_run = stopwatch(gather.by_torch)
    rounds = Rounds("ours", gather.run, {"copy ceiling": ceilings.copy(1), "torch index": torch_run})
    rounds.measure(benchmark, scale.num_rounds)
    copied_bytes = gather.num_tokens * TOKEN_BYTES
    report(
        rounds,
        kernel="kv_gather",
        shape="sequences of 512",
        num_threads=1,
        kv_bytes=copied_bytes,
        gb_s=copied_bytes / rounds.median_s("ours") / 1e9,
        copy_ceiling_gb_s=ceilings.num_bytes / rounds.median_s("copy ceiling") / 1e9,
        share_of_ceiling=rounds.ratio("copy ceiling", "ours") * copied_bytes / ceilings.num_bytes,
        times_faster_than={"torch index": rounds.ratio("torch index", "ours")},
    )
    gather.by_torch()
    expected = gather.out.clone()
    gather.out.zero_()
    gather.run()
    assert torch.equal(gather.out, expected)
