"""Make random paged caches for the attention tests."""

from __future__ import annotations

from dataclasses import dataclass

import torch

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass
class PagedCase:
    q: torch.Tensor  # [seqs, heads, head_dim]
    k_cache: torch.Tensor  # [num_blocks, kv_heads, block_size, head_dim]
    v_cache: torch.Tensor
    block_tables: torch.Tensor  # int32 [seqs, max_blocks]; -1 beyond each sequence's blocks
    context_lens: torch.Tensor  # int32 [seqs]
    scale: float

    @property
    def arguments(self) -> tuple[torch.Tensor, ...]:
        return self.q, self.k_cache, self.v_cache, self.block_tables, self.context_lens


def paged_case(
    lengths: list[int],
    *,
    num_kv_heads: int = 2,
    group: int = 4,
    head_dim: int = 64,
    block_size: int = 16,
    kv_dtype: torch.dtype = torch.bfloat16,
    q_dtype: torch.dtype = torch.bfloat16,
    magnitude: float = 1.0,
    seed: int = 0,
) -> PagedCase:
    """Make sequences of `lengths` tokens in blocks shuffled over the cache, which also holds blocks of NaN that belong
    to no sequence."""
    generator = torch.Generator().manual_seed(seed)
    blocks_of = [-(-length // block_size) for length in lengths]
    num_blocks = sum(blocks_of) + 3
    order = torch.randperm(num_blocks, generator=generator, dtype=torch.int32)
    tables = torch.full((len(lengths), max(blocks_of, default=0) + 1), -1, dtype=torch.int32)
    cache_shape = (num_blocks, num_kv_heads, block_size, head_dim)
    k_cache, v_cache = (torch.full(cache_shape, float("nan"), dtype=kv_dtype) for _ in range(2))
    used = 0
    for seq, num in enumerate(blocks_of):
        tables[seq, :num] = order[used : used + num]
        used += num
        for index in range(lengths[seq]):
            block, offset = int(tables[seq, index // block_size]), index % block_size
            for cache in (k_cache, v_cache):
                row = torch.randn((num_kv_heads, head_dim), generator=generator) * magnitude
                cache[block, :, offset] = row.to(kv_dtype)
    q = (torch.randn((len(lengths), num_kv_heads * group, head_dim), generator=generator) * magnitude).to(q_dtype)
    return PagedCase(q, k_cache, v_cache, tables, torch.tensor(lengths, dtype=torch.int32), head_dim**-0.5)
