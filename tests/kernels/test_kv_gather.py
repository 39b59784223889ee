"""kv_gather against slices of the cache, and attention over what it leaves against the float64 oracle."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from paged import DTYPES

import kernels
from kernels import reference

SETTINGS = {"derandomize": True, "suppress_health_check": [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]}
LENGTHS = st.lists(st.integers(0, 40), min_size=0, max_size=5)


def paged(lengths, block_size, forms, dtype, *, seed, padding=0):
    """Caches with shuffled blocks, strided in dim 0 where there is padding, and the tables of such sequences."""
    generator = torch.Generator().manual_seed(seed)
    used = [-(-length // block_size) for length in lengths]
    num_blocks = sum(used) + 1
    order = torch.randperm(num_blocks, generator=generator).int()
    tables = torch.full((len(lengths), max(used, default=0) + 1), -7, dtype=torch.int32)  # never read
    first = 0
    for row, count in zip(tables, used, strict=True):
        row[:count] = order[first : first + count]
        first += count
    caches = [
        torch.randn((num_blocks, heads + padding, block_size, width), generator=generator).to(dtype)[:, :heads]
        for heads, width in forms
    ]
    return caches, tables, torch.tensor(lengths, dtype=torch.int32)


def gathered(caches, tables, lengths):
    """What is expected, token by token."""
    rows = []
    for table, length in zip(tables, lengths.tolist(), strict=True):
        for cache in caches:
            block_size = cache.shape[2]
            tokens = [cache[table[t // block_size], :, t % block_size] for t in range(length)]
            rows += [torch.stack(tokens, 1).flatten()] if tokens else []
    return torch.cat(rows) if rows else caches[0].new_empty(0)


@settings(max_examples=60, **SETTINGS)
@given(
    lengths=LENGTHS,
    block_size=st.sampled_from([1, 4, 16]),
    forms=st.lists(st.tuples(st.integers(1, 3), st.sampled_from([1, 7, 64])), min_size=1, max_size=2),
    dtype=st.sampled_from(list(DTYPES)),
    padding=st.integers(0, 2),
    seed=st.integers(0, 1000),
)
def test_gathers_every_token(lengths, block_size, forms, dtype, padding, seed):
    caches, tables, lens = paged(lengths, block_size, forms, DTYPES[dtype], seed=seed, padding=padding)
    expected = gathered(caches, tables, lens)
    room = torch.full((len(expected) + 2,), 3.0, dtype=DTYPES[dtype])
    kernels.kv_gather(caches, tables, lens, room[1:-1])
    assert torch.equal(room[1:-1], expected) and room[0] == room[-1] == 3.0


@settings(max_examples=40, **SETTINGS)
@given(
    lengths=LENGTHS,
    num_kv_heads=st.integers(1, 3),
    group=st.integers(1, 8),
    head_dim=st.sampled_from([1, 7, 64, 128]),
    dtype=st.sampled_from(list(DTYPES)),
    window=st.sampled_from([0, 1, 5]),
    has_sinks=st.booleans(),
    mode=st.sampled_from(["float32", "bf16_round"]),
    seed=st.integers(0, 1000),
)
def test_attention_over_what_was_gathered(
    isa, lengths, num_kv_heads, group, head_dim, dtype, window, has_sinks, mode, seed
):
    caches, tables, lens = paged(lengths, 4, [(num_kv_heads, head_dim)] * 2, DTYPES[dtype], seed=seed)
    generator = torch.Generator().manual_seed(seed)
    num_heads = num_kv_heads * group
    q = torch.randn((len(lengths), num_heads + 1, head_dim), generator=generator)[:, :num_heads]  # strided
    sinks = torch.randn(num_heads, generator=generator) if has_sinks else None
    options = {"scale": 0.3, "sliding_window": window, "sinks": sinks}
    out, same = torch.full((len(lengths), num_heads, head_dim), 3.0), torch.empty(len(lengths), num_heads, head_dim)
    staging = gathered(caches, tables, lens)
    kernels.staged_attention(q, staging, lens, out, num_kv_heads=num_kv_heads, mode=mode, **options)
    kernels.decode_attention(q, *caches, tables, lens, same, mode=mode, **options)
    expected = reference.decode_attention(q, *caches, tables, lens, bf16_round=mode == "bf16_round", **options)
    error = 1e-5 if mode == "float32" else 2e-2
    torch.testing.assert_close(out.double(), expected, rtol=error, atol=error)
    torch.testing.assert_close(out, same, rtol=1e-5, atol=1e-5 if mode == "float32" else error)


@settings(max_examples=20, **SETTINGS)
@given(
    lengths=LENGTHS,
    num_heads=st.integers(1, 9),
    dims=st.sampled_from([(8, 12), (1, 1), (64, 80)]),
    dtype=st.sampled_from(list(DTYPES)),
    num_threads=st.sampled_from([1, 2]),
    seed=st.integers(0, 1000),
)
def test_latent_attention_over_what_was_gathered(isa, lengths, num_heads, dims, dtype, num_threads, seed):
    latent_dim, dim = dims
    [cache], tables, lens = paged(lengths, 4, [(1, dim)], DTYPES[dtype], seed=seed)
    q = torch.randn((len(lengths), num_heads, dim), generator=torch.Generator().manual_seed(seed))
    out = torch.empty(len(lengths), num_heads, latent_dim)
    staging = gathered([cache], tables, lens)
    kernels.staged_latent_attention(q, staging, lens, out, scale=0.2, num_threads=num_threads)
    same = torch.empty_like(out)
    kernels.latent_attention(q, cache.squeeze(1), tables, lens, same, scale=0.2)
    torch.testing.assert_close(out, same, rtol=1e-5, atol=1e-5)


def test_bad_arguments_are_named_and_nothing_is_written():
    caches, tables, lens = paged([5, 3], 4, [(2, 8), (2, 8)], torch.float32, seed=0)
    out = torch.full((8 * 2 * 16,), 3.0)
    wrong = {
        r"lengths\[0\]: expected 0 to": (caches, tables, torch.tensor([99, 3], dtype=torch.int32), out),
        r"lengths\[1\]: expected 0 to": (caches, tables, torch.tensor([5, -1], dtype=torch.int32), out),
        r"block_tables\[1, 0\]: expected a block below": (caches, tables.where(tables != tables[1, 0], 99), lens, out),
        "out: expected 1024 bytes": (caches, tables, lens, out[:-1]),
        r"caches: expected one": ([], tables, lens, out),
        r"caches\[1\]": ([caches[0], caches[1][:1]], tables, lens, out),
        "lengths": (caches, tables, lens.long(), out),
        "out: overlaps": ([cache.view(-1)[: cache.numel()].view_as(cache) for cache in caches], tables, lens,
                          caches[0].view(-1)[: out.numel()]),
    }  # fmt: skip
    for told, arguments in wrong.items():
        before = arguments[3].clone()
        with pytest.raises(ValueError, match=told):
            kernels.kv_gather(*arguments)
        assert torch.equal(arguments[3], before)


def test_staging_of_another_size_is_refused():
    q, out = torch.zeros(1, 2, 4), torch.zeros(1, 2, 4)
    for lens, size in (([3], 23), ([-1], 24)):
        with pytest.raises(ValueError, match=r"staging: expected 24|context_lens\[0\]"):
            kernels.staged_attention(
                q, torch.zeros(size), torch.tensor(lens, dtype=torch.int32), out, num_kv_heads=1, scale=1.0
            )
    with pytest.raises(ValueError, match="num_kv_heads"):
        kernels.staged_attention(q, torch.zeros(24), torch.tensor([3], dtype=torch.int32), out, num_kv_heads=3, scale=1)
