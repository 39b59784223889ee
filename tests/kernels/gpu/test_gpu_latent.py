"""Decode attention over latents on the device against float64."""

import pytest
import torch
from caches import TOLERANCE, Draw, close, flat, make_cache
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import reference
from kernels import triton as gpu

quick = settings(max_examples=5)


def stage(cache, tables, context_lens):
    """The rows of the first sequence [context, width], then those of the second, and so on; as `LoadKv` stages them."""
    parts = []
    for row, length in enumerate(context_lens):
        blocks = tables[row, : -(-length // cache.shape[2])].long()
        parts.append(cache[blocks].view(-1, cache.shape[3])[:length].reshape(-1))
    return torch.cat(parts)


def in_rows(tensor):
    """The tensor where rows are longer than its entries, with NaN between them."""
    room = torch.full((len(tensor), tensor[0].numel() + 16), float("nan"), dtype=tensor.dtype, device=tensor.device)
    entries = room[:, :-16].view(tensor.shape)
    return entries.copy_(tensor)


def check_both(draw, context_lens, num_heads, kv_rank, rope_dim, block_size):
    """Compare attention over both layouts with the oracle, to which latents are keys and, cut short, values."""
    q = in_rows(draw(len(context_lens), num_heads, kv_rank + rope_dim))
    cache, _, tables = make_cache(draw, context_lens, 1, kv_rank + rope_dim, block_size)
    scale, lens = (kv_rank + rope_dim) ** -0.5, torch.tensor(context_lens, dtype=torch.int32)
    expected = reference.decode_attention(q.cpu(), cache.cpu(), cache.cpu(), tables.cpu(), lens, scale=scale)
    positions = lens.long().to(draw.device) - 1
    paged, staged = (in_rows(torch.full_like(q[..., :kv_rank], float("nan"))) for _ in range(2))
    gpu.paged_latent_attention(q, cache, flat(tables, context_lens, block_size), positions, paged, scale=scale)
    close(paged, expected[..., :kv_rank])
    gpu.staged_latent_attention(q, stage(cache, tables, context_lens), positions, staged, scale=scale)
    close(staged, expected[..., :kv_rank])


@quick
@given(
    context_lens=st.lists(st.integers(1, 30) | st.just(140), min_size=1, max_size=5),
    block_size=st.sampled_from((4, 16)),
    num_heads=st.sampled_from((1, 4, 16, 40)),
    kv_rank=st.sampled_from((4, 16, 24, 64)),
    rope_dim=st.sampled_from((2, 8, 16)),
    dtype=st.sampled_from(tuple(TOLERANCE)),
    seed=st.integers(0, 10**6),
)
def test_decode(device, context_lens, block_size, num_heads, kv_rank, rope_dim, dtype, seed):
    check_both(Draw(device, dtype, seed), context_lens, num_heads, kv_rank, rope_dim, block_size)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_rows_of_deepseek(device, dtype):
    """Rows of 576 numbers, more heads than a program takes, and a tile of tokens that is full and one that is not."""
    check_both(Draw(device, dtype, 0), [70, 32], 72, 512, 64, 16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(3, 4, 24, dtype=torch.int32)}, "q: expected bfloat16, float16 or float32"),
        ({"cache": torch.zeros(2, 2, 4, 24)}, "cache: expected \\[blocks, 1, block_size, width\\]"),
        ({"cache": torch.zeros(2, 1, 4, 20)}, "cache: expected rows of 24 numbers"),
        ({"cache": torch.zeros(2, 1, 4, 48)[..., :24]}, "cache: expected contiguous blocks"),
        ({"cache": torch.zeros(2, 1, 4, 24, dtype=torch.float16)}, "cache: expected torch.float32"),
        ({"blocks": torch.zeros(3, dtype=torch.int64)}, "blocks: expected torch.int32"),
        ({"positions": torch.zeros(2, dtype=torch.int64)}, "positions: expected shape \\(3,\\)"),
        ({"out": torch.zeros(3, 4, 24)}, "out: expected kv_rank from 1 to 23"),
        ({"out": torch.zeros(3, 3, 16)}, "out: expected \\(3, 4, 16\\)"),
        ({"q": torch.zeros(3, 4, 48)[..., :24]}, "q: expected a contiguous"),
        ({"staging": torch.zeros(72, dtype=torch.float16)}, "staging: expected torch.float32"),
        ({"staging": torch.zeros(3, 24)}, "staging: expected 1 dimensions"),
    ],
)
def test_wrong_arguments_are_named(device, change, message):
    arguments = {
        "q": torch.zeros(3, 4, 24),
        "cache": torch.zeros(2, 1, 4, 24),
        "blocks": torch.zeros(3, dtype=torch.int32),
        "staging": torch.zeros(72),
        "positions": torch.zeros(3, dtype=torch.int64),
        "out": torch.zeros(3, 4, 16),
    } | change
    q, cache, blocks, staging, positions, out = (tensor.to(device) for tensor in arguments.values())
    with pytest.raises(ValueError, match=message):
        if "staging" in change:
            gpu.staged_latent_attention(q, staging, positions, out, scale=1.0)
        gpu.paged_latent_attention(q, cache, blocks, positions, out, scale=1.0)
