"""Rows out of host memory: the same bytes as a copy, and the same layout as the C++ gather."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kernels
from kernels import triton as gpu


def on_host(tensor, device):
    """As a GPU reads it: pinned."""
    return tensor.pin_memory() if device.type == "cuda" else tensor


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("shape", [(1,), (7,), (8,), (3, 1000), (2, 5000)])
def test_rows_arrive_and_nothing_beside_them(device, dtype, shape):
    src = on_host(torch.randint(1, 100, shape).to(dtype), device)
    around = torch.zeros(src.numel() + 32, dtype=dtype, device=device)
    gpu.bring(around[16:-16].view(shape), src)
    assert torch.equal(around[16:-16].view(shape).cpu(), src)
    assert not around[:16].any() and not around[-16:].any()


def test_part_of_a_buffer_that_starts_anywhere(device):
    src = on_host(torch.arange(100, dtype=torch.uint8), device)[3:80]
    dst = torch.zeros(77, dtype=torch.uint8, device=device)
    gpu.bring(dst, src)
    assert torch.equal(dst.cpu(), src)


def test_what_does_not_fit_is_named(device):
    with pytest.raises(ValueError, match="src: expected"):
        gpu.bring(torch.zeros(4, device=device), torch.zeros(5))
    with pytest.raises(ValueError, match="contiguous"):
        gpu.bring(torch.zeros(4, 4, device=device).T, torch.zeros(4, 4))
    cache = torch.zeros(2, 1, 4, 8)
    numbers = gpu.gather_numbers(torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32), 8)
    with pytest.raises(ValueError, match="numbers: expected"):
        gpu.gather_kv([cache], numbers, 2, 1, torch.zeros(8, device=device))
    with pytest.raises(ValueError, match=r"caches\[0\]: expected contiguous"):
        gpu.gather_kv([cache.transpose(1, 2)], numbers, 1, 1, torch.zeros(8, device=device))


@given(
    lengths=st.lists(st.integers(0, 11), min_size=1, max_size=4),
    heads=st.sampled_from([1, 2]),
    width=st.sampled_from([3, 16]),
    num_caches=st.sampled_from([1, 2]),
    spare=st.sampled_from([0, 16]),
    seed=st.integers(0, 99),
)
def test_sequences_lie_as_the_c_plus_plus_gather_leaves_them(device, lengths, heads, width, num_caches, spare, seed):
    generator, block_size = torch.Generator().manual_seed(seed), 4
    max_blocks = max(1, -(-max(lengths) // block_size))
    num_blocks = len(lengths) * max_blocks
    wide = heads * block_size * width + spare  # blocks with others' rows between them
    caches = [
        on_host(torch.randn(num_blocks, wide, generator=generator).bfloat16(), device)[
            :, : heads * block_size * width
        ].view(num_blocks, heads, block_size, width)
        for _ in range(num_caches)
    ]
    tables = torch.randperm(num_blocks, generator=generator).int().view(len(lengths), max_blocks)
    lens = torch.tensor(lengths, dtype=torch.int32)
    token_dim = num_caches * heads * width
    expected = torch.zeros(sum(lengths) * token_dim, dtype=torch.bfloat16)
    if expected.numel():
        kernels.kv_gather(caches, tables, lens, expected)
    found = torch.full((len(expected) + 16,), 7.0, dtype=torch.bfloat16, device=device)
    numbers = on_host(gpu.gather_numbers(tables, lens, token_dim), device)
    gpu.gather_kv(caches, numbers, len(lengths), max_blocks, found[:-16])
    assert torch.equal(found[:-16].cpu(), expected)
    assert (found[-16:] == 7).all()
