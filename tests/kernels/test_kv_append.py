"""kv_append against one torch assignment a token."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from paged import DTYPES

import kernels
from kernels import reference

# Rounding ties, overflow to infinity, half-precision denormals, float32 denormals, infinities and NaN.
SPECIAL_VALUES = [0.0, -0.0, 1.00390625, 1.01171875, 65519.9, 65520.0, 1e38, 3.4e38, 6e-8, 2.9e-8, 3e-8, 5.9e-5, 1e-40]
SPECIAL_VALUES += [2049.0, 2051.0, float("inf"), float("-inf"), float("nan"), 6.1e-5, -6.09e-5]


@settings(
    max_examples=40, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(
    num_tokens=st.integers(0, 40),
    num_kv_heads=st.integers(1, 4),
    head_dim=st.sampled_from([1, 7, 64, 128]),
    block_size=st.sampled_from([1, 4, 16]),
    src=st.sampled_from(list(DTYPES)),
    dst=st.sampled_from(list(DTYPES)),
    index_dtype=st.sampled_from([torch.int32, torch.int64]),
    padding=st.integers(0, 9),
    num_threads=st.integers(1, 3),
    seed=st.integers(0, 1000),
)
def test_matches_torch(
    isa, num_tokens, num_kv_heads, head_dim, block_size, src, dst, index_dtype, padding, num_threads, seed
):
    generator = torch.Generator().manual_seed(seed)
    row = num_kv_heads * head_dim
    wide = [torch.randn((num_tokens, row + i * padding), generator=generator).to(DTYPES[src]) for i in (2, 1)]
    k, v = (rows[:, :row].view(num_tokens, num_kv_heads, head_dim) for rows in wide)
    num_blocks, heads = num_tokens // block_size + 2, (num_kv_heads, num_kv_heads + padding % 3)
    pools = [torch.full((num_blocks, n, block_size, head_dim), 3.0, dtype=DTYPES[dst]) for n in heads]
    caches = [pool[:, :num_kv_heads] for pool in pools]  # keys and values with strides of their own
    expected = [cache.clone() for cache in caches]
    slots = torch.randperm(num_blocks * block_size, generator=generator)[:num_tokens].to(index_dtype)
    kernels.kv_append(k, v, *caches, slots, num_threads=num_threads)
    reference.kv_append(k, v, *expected, slots)
    assert torch.equal(caches[0], expected[0]) and torch.equal(caches[1], expected[1])


@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize(("heads", "dim"), [(8, 128), (3, 40), (1, 576)])
def test_the_last_of_equal_slots_wins_whatever_threads_do(heads, dim, num_threads):
    generator = torch.Generator().manual_seed(1)
    k, v = torch.randn(2, 900, heads, dim, generator=generator)
    slots = torch.randint(0, 160, (900,), generator=generator)
    caches, expected = torch.zeros(2, 10, heads, 16, dim), torch.zeros(2, 10, heads, 16, dim)
    reference.kv_append(k, v, *expected, slots)
    kernels.kv_append(k, v, *caches, slots, num_threads=num_threads)
    assert torch.equal(caches, expected)
    if heads == 1:
        latent = torch.zeros(10, 16, dim)
        kernels.latent_append(k[:, 0], latent, slots, num_threads=num_threads)
        assert torch.equal(latent, expected[0, :, 0])


@pytest.mark.parametrize("dst", list(DTYPES))
@pytest.mark.parametrize("src", list(DTYPES))
def test_conversion_of_special_values(isa, src, dst):
    values = torch.tensor(SPECIAL_VALUES).to(DTYPES[src]).view(1, 1, -1)
    caches = [torch.zeros(1, 1, 1, values.numel(), dtype=DTYPES[dst]) for _ in range(2)]
    kernels.kv_append(values, -values, *caches, torch.tensor([0]))
    for cache, source in zip(caches, (values, -values), strict=True):
        assert torch.equal(cache.view(-1).nan_to_num(nan=123.0), source.to(DTYPES[dst]).view(-1).nan_to_num(nan=123.0))


def test_every_half_precision_value_widens_exactly(isa):
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.float16, torch.bfloat16):
        values = bits.view(dtype).view(1, 1, -1)
        caches = [torch.zeros(1, 1, 1, 2**16) for _ in range(2)]
        kernels.kv_append(values, values, *caches, torch.tensor([0], dtype=torch.int32))
        assert torch.equal(caches[0].view(-1).nan_to_num(nan=1.5), values.view(-1).float().nan_to_num(nan=1.5))


@pytest.fixture
def flushed_denormals():
    """Float32 denormals count as zero, in this thread; half-precision ones still have their values."""
    assert torch.set_flush_denormal(True)
    yield
    torch.set_flush_denormal(False)


def test_half_precision_denormals_survive_flushing(isa, flushed_denormals):
    denormals = torch.arange(1, 1024, dtype=torch.int16)
    expected = [number * 2.0**-24 for number in range(1, 1024)]
    values = denormals.view(torch.float16).view(1, 1, -1)
    wide = [torch.zeros(1, 1, 1, 1023) for _ in range(2)]
    kernels.kv_append(values, values, *wide, torch.tensor([0]))
    assert wide[0].view(-1).tolist() == expected
    narrow = [torch.zeros(1, 1, 1, 1023, dtype=torch.float16) for _ in range(2)]
    kernels.kv_append(wide[0][:, 0], -wide[0][:, 0], *narrow, torch.tensor([0]))
    assert torch.equal(narrow[0].view(-1).view(torch.int16), denormals)
    assert torch.equal(narrow[1].view(-1).view(torch.int16), denormals - 2**15)


def test_writes_into_strided_blocks(isa):
    pool = torch.zeros(4, 2, 2, 8, 16)  # [num_blocks, k or v, kv_heads, block_size, head_dim]
    k = torch.randn(5, 2, 16)
    slots = torch.tensor([31, 0, 9, 8, 17])
    kernels.kv_append(k, 2 * k, pool[:, 0], pool[:, 1], slots)
    assert torch.equal(pool[slots // 8, 0, :, slots % 8], k)
    assert torch.equal(pool[slots // 8, 1, :, slots % 8], 2 * k)
    assert int((pool != 0).any(-1).sum()) == 2 * 2 * 5
