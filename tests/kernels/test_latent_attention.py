"""latent_attention with absorbed projections against attention with decompressed keys and values."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from paged import DTYPES

import kernels
from kernels import reference


def latent_cache(lengths: list[int], dim: int, block_size: int, dtype: torch.dtype, seed: int):
    """A cache filled through `latent_append` in random order, NaN elsewhere; block tables and lengths."""
    generator = torch.Generator().manual_seed(seed)
    blocks_of = [-(-length // block_size) for length in lengths]
    order = torch.randperm(sum(blocks_of) + 2, generator=generator, dtype=torch.int32)
    tables = torch.full((len(lengths), max(blocks_of) + 1), -1, dtype=torch.int32)
    cache = torch.full((len(order), block_size, dim), float("nan"), dtype=dtype)
    slots, used = [], 0
    for seq, num in enumerate(blocks_of):
        tables[seq, :num] = order[used : used + num]
        used += num
        slots += [int(tables[seq, i // block_size]) * block_size + i % block_size for i in range(lengths[seq])]
    rows = torch.randn((len(slots), dim), generator=generator)
    shuffled = torch.randperm(len(slots), generator=generator)
    kernels.latent_append(rows[shuffled], cache, torch.tensor(slots, dtype=torch.int64)[shuffled])
    return cache, tables, torch.tensor(lengths, dtype=torch.int32)


@settings(
    max_examples=12, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(
    lengths=st.lists(st.integers(0, 60), min_size=1, max_size=3),
    num_heads=st.integers(1, 9),
    dims=st.sampled_from([(512, 64), (512, 64), (48, 16), (30, 7)]),
    block_size=st.sampled_from([1, 16, 20]),
    dtype=st.sampled_from(list(DTYPES)),
    num_threads=st.sampled_from([1, 2]),
    seed=st.integers(0, 1000),
)
def test_absorbed_equals_decompressed(isa, lengths, num_heads, dims, block_size, dtype, num_threads, seed):
    latent_dim, rope_dim = dims
    nope_dim, value_dim, num_seqs = 24, 20, len(lengths)
    cache, tables, context_lens = latent_cache(lengths, latent_dim + rope_dim, block_size, DTYPES[dtype], seed)
    generator = torch.Generator().manual_seed(seed + 1)
    q_nope, q_rope = (torch.randn((num_seqs, num_heads, d), generator=generator) for d in (nope_dim, rope_dim))
    key_up, value_up = (
        torch.randn((num_heads, d, latent_dim), generator=generator) / latent_dim**0.5 for d in (nope_dim, value_dim)
    )
    absorbed = torch.cat([torch.einsum("shn,hnl->shl", q_nope.double(), key_up.double()).float(), q_rope], dim=-1)
    out = torch.empty(num_seqs, num_heads, latent_dim)
    scale = (nope_dim + rope_dim) ** -0.5
    kernels.latent_attention(absorbed, cache, tables, context_lens, out, scale=scale, num_threads=num_threads)
    values = torch.einsum("shl,hvl->shv", out.double(), value_up.double())
    expected = reference.latent_attention(q_nope, q_rope, key_up, value_up, cache, tables, context_lens, scale=scale)
    assert float((values - expected).abs().max()) < 1e-5


@pytest.mark.parametrize("num_heads", [4, 9, 16, 17, 40])
@pytest.mark.parametrize("dims", [(64, 16), (64, 32), (512, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_long_context_is_split_over_threads(isa, dtype, dims, num_heads):
    """Tiles take the queries of bfloat16, of 5 heads and more, whose rows are a multiple of 32 long."""
    latent_dim, row_dim = dims[0], sum(dims)
    cache, tables, context_lens = latent_cache([1500, 2], row_dim, 16, torch.bfloat16, 3)
    q, scale = torch.randn(2, num_heads, row_dim).to(dtype), row_dim**-0.5
    outs = [torch.empty(2, num_heads, latent_dim) for _ in range(2)]
    for out, num_threads in zip(outs, (1, 3), strict=True):
        kernels.latent_attention(q, cache, tables, context_lens, out, scale=scale, num_threads=num_threads)
    assert torch.allclose(*outs, atol=2e-6, rtol=0)
    values = cache[..., :latent_dim].unsqueeze(1)
    padded = torch.cat([values, torch.zeros_like(cache[..., latent_dim:]).unsqueeze(1)], dim=-1)
    expected = reference.decode_attention(q, cache.unsqueeze(1), padded, tables, context_lens, scale=scale)
    assert float((outs[0].double() - expected[..., :latent_dim]).abs().max()) < 4e-6


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("q", torch.zeros(2, 16)),
        ("cache", torch.zeros(3, 16, 40)),
        ("cache", torch.zeros(3, 1, 16, 48)),
        ("cache", torch.zeros(3, 48, 16).transpose(1, 2)),
        ("out", torch.zeros(2, 4, 49)),
        ("out", torch.zeros(2, 3, 32)),
        ("context_lens", torch.tensor([49, 1], dtype=torch.int32)),
        ("block_tables", torch.full((2, 3), 7, dtype=torch.int32)),
        ("mode", "exact"),
        ("num_threads", 0),
    ],
)
def test_bad_arguments_are_named(field, value):
    arguments = {
        "q": torch.zeros(2, 4, 48),
        "cache": torch.zeros(3, 16, 48),
        "block_tables": torch.zeros(2, 3, dtype=torch.int32),
        "context_lens": torch.ones(2, dtype=torch.int32),
        "out": torch.zeros(2, 4, 32),
        "scale": 1.0,
        field: value,
    }
    with pytest.raises(ValueError, match=f"^{field}"):
        kernels.latent_attention(**arguments)


def test_append_refuses_a_slot_out_of_range():
    cache = torch.zeros(2, 4, 6)
    with pytest.raises(ValueError, match=r"^slots\[1\]"):
        kernels.latent_append(torch.ones(2, 6), cache, torch.tensor([0, 8]))
    assert not cache.any()
