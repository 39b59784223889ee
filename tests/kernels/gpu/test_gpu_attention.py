"""Attention on the device, prefill and decode, against float64."""

import numpy as np
import pytest
import torch
from caches import TOLERANCE, Draw, close, flat, make_cache
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kernels import reference
from kernels import triton as gpu
from kernels.triton.tiling import Chip, decode_splits

quick = settings(max_examples=5)

shapes = {
    "dtype": st.sampled_from(tuple(TOLERANCE)),
    "num_kv_heads": st.integers(1, 3),
    "group": st.sampled_from((1, 2, 4, 7)),
    "head_dim": st.sampled_from((4, 16, 24, 64)),
    "window": st.none() | st.integers(1, 90),
    "has_sinks": st.booleans(),
    "seed": st.integers(0, 10**6),
}


def plain_attention(q, k, v, seq_lens, scale, window, sinks):
    """float64 [tokens, heads, value_dim], one query of one head after another."""
    q, k, v = (x.double().cpu().numpy() for x in (q, k, v))
    group, start = q.shape[1] // k.shape[1], 0
    out = np.zeros((len(q), q.shape[1], v.shape[2]))
    for length in seq_lens:
        for row in range(start, start + length):
            first = start if window is None else max(start, row - window + 1)
            for head in range(q.shape[1]):
                scores = k[first : row + 1, head // group] @ q[row, head] * scale
                if sinks is not None:
                    scores = np.append(scores, float(sinks[head]))
                probs = reference.softmax(scores)[: row + 1 - first]
                out[row, head] = probs @ v[first : row + 1, head // group]
        start += length
    return torch.from_numpy(out)


def positions_of(seq_lens, device):
    return torch.cat([torch.arange(n) for n in seq_lens] or [torch.empty(0, dtype=torch.int64)]).to(device)


@quick
@given(
    seq_lens=st.lists(st.integers(1, 20) | st.just(140), max_size=3),
    value_dim=st.sampled_from((None, 8, 20)),
    **shapes,
)
def test_prefill(device, seq_lens, value_dim, dtype, num_kv_heads, group, head_dim, window, has_sinks, seed):
    draw, num_tokens, num_heads = Draw(device, dtype, seed), sum(seq_lens), num_kv_heads * group
    q, k = draw(num_tokens, num_heads, head_dim), draw(num_tokens, num_kv_heads, head_dim)
    v = draw(num_tokens, num_kv_heads, value_dim or head_dim)
    sinks = draw(num_heads) if has_sinks else None
    out = torch.full((num_tokens, num_heads, v.shape[2]), float("nan"), dtype=dtype, device=device)
    scale = head_dim**-0.5
    gpu.causal_attention(q, k, v, positions_of(seq_lens, device), out, scale=scale, window=window, sinks=sinks)
    close(out, plain_attention(q, k, v, seq_lens, scale, window, sinks))


def stage(k_cache, v_cache, tables, context_lens):
    """Keys of the first sequence [kv_heads, context, head_dim], its values, and so on; as `LoadKv` stages them."""
    parts = []
    for row, length in enumerate(context_lens):
        blocks = tables[row, : -(-length // k_cache.shape[2])].long()
        parts += [c[blocks].transpose(0, 1).flatten(1, 2)[:, :length].reshape(-1) for c in (k_cache, v_cache)]
    return torch.cat(parts)


@quick
@given(
    context_lens=st.lists(st.integers(1, 30) | st.just(140), min_size=1, max_size=5),
    block_size=st.sampled_from((4, 16)),
    **shapes,
)
def test_decode(device, context_lens, block_size, dtype, num_kv_heads, group, head_dim, window, has_sinks, seed):
    draw, num_heads = Draw(device, dtype, seed), num_kv_heads * group
    q = draw(len(context_lens), num_heads, head_dim)
    k_cache, v_cache, tables = make_cache(draw, context_lens, num_kv_heads, head_dim, block_size)
    sinks = draw(num_heads) if has_sinks else None
    positions = torch.tensor(context_lens, device=device) - 1
    scale = head_dim**-0.5
    on_host = (x.cpu() for x in (q, k_cache, v_cache, tables, torch.tensor(context_lens, dtype=torch.int32)))
    host_sinks = None if sinks is None else sinks.float().cpu()
    expected = reference.decode_attention(*on_host, scale=scale, sliding_window=window or 0, sinks=host_sinks)

    paged, staged = torch.full_like(q, float("nan")), torch.full_like(q, float("nan"))
    options = {"scale": scale, "window": window, "sinks": sinks}
    gpu.paged_decode_attention(q, k_cache, v_cache, flat(tables, context_lens, block_size), positions, paged, **options)
    close(paged, expected)
    staging = stage(k_cache, v_cache, tables, context_lens)
    gpu.staged_decode_attention(q, staging, positions, staged, num_kv_heads=num_kv_heads, **options)
    close(staged, expected)


@quick
@example(
    context_lens=[5, 140, 70], splits=3, block_size=16, dtype=torch.float32, num_kv_heads=2, group=2, head_dim=16,
    window=None, has_sinks=True, seed=0,
)  # fmt: skip
@given(
    context_lens=st.lists(st.integers(1, 30) | st.just(140) | st.just(300), min_size=1, max_size=3),
    splits=st.integers(2, 6),
    block_size=st.sampled_from((4, 16)),
    **shapes,
)
def test_decode_with_shared_contexts(
    device, context_lens, splits, block_size, dtype, num_kv_heads, group, head_dim, window, has_sinks, seed
):
    """As many programs as there are steps, more, or fewer: some have no key, and sinks count once."""
    draw, num_heads = Draw(device, dtype, seed), num_kv_heads * group
    q = draw(len(context_lens), num_heads, head_dim)
    k_cache, v_cache, tables = make_cache(draw, context_lens, num_kv_heads, head_dim, block_size)
    sinks = draw(num_heads) if has_sinks else None
    positions = torch.tensor(context_lens, device=device) - 1
    scale = head_dim**-0.5
    on_host = (x.cpu() for x in (q, k_cache, v_cache, tables, torch.tensor(context_lens, dtype=torch.int32)))
    host_sinks = None if sinks is None else sinks.float().cpu()
    expected = reference.decode_attention(*on_host, scale=scale, sliding_window=window or 0, sinks=host_sinks)
    found, options = torch.full_like(q, float("nan")), {"scale": scale, "window": window, "sinks": sinks}
    staging = stage(k_cache, v_cache, tables, context_lens)
    gpu.staged_decode_attention(q, staging, positions, found, num_kv_heads=num_kv_heads, splits=splits, **options)
    close(found, expected)
    blocks = flat(tables, context_lens, block_size)
    again = torch.full_like(q, float("nan"))
    gpu.paged_decode_attention(q, k_cache, v_cache, blocks, positions, again, splits=splits, **options)
    close(again, expected)


def test_contexts_are_shared_where_sequences_are_few():
    """By sequences times KV heads; an H100 has 132 processors."""
    chip = Chip(processors=132)
    assert [decode_splits(programs, chip) for programs in (8, 32, 128, 256, 264, 265, 9000)] == [32, 8, 2, 1, 1, 1, 1]
    assert decode_splits(1, Chip()) == 1, "nobody knows the GPU"


def test_more_sequences_than_one_step_adds_up(device, monkeypatch):
    monkeypatch.setattr("kernels.triton.decode.LENGTHS_AT_ONCE", 8)  # 128 of them would take long
    draw, count = Draw(device, torch.float32, 0), 20
    context_lens = [1 + i % 3 for i in range(count)]
    k_cache, v_cache, tables = make_cache(draw, context_lens, 1, 16, 4)
    q, positions = draw(count, 1, 16), torch.tensor(context_lens, device=device) - 1
    paged, staged = torch.empty_like(q), torch.empty_like(q)
    gpu.paged_decode_attention(q, k_cache, v_cache, flat(tables, context_lens, 4), positions, paged, scale=0.25)
    staging = stage(k_cache, v_cache, tables, context_lens)
    gpu.staged_decode_attention(q, staging, positions, staged, num_kv_heads=1, scale=0.25)
    torch.testing.assert_close(staged, paged, rtol=1e-5, atol=1e-6)


def test_large_scores_do_not_overflow(device):
    q = torch.full((20, 1, 16), 40.0, device=device)
    v = torch.randn(20, 1, 16, device=device)
    out = torch.empty_like(q)
    gpu.causal_attention(q, q, v, positions_of([20], device), out, scale=1.0)
    close(out, plain_attention(q, q, v, [20], 1.0, None, None))


def test_wrong_arguments_are_named(device):
    q, kv = torch.zeros(3, 4, 16, device=device), torch.zeros(3, 2, 16, device=device)
    positions = torch.arange(3, device=device)
    out = torch.empty_like(q)
    with pytest.raises(ValueError, match="no multiple of 3 KV heads"):
        wrong = torch.zeros(3, 3, 16, device=device)
        gpu.causal_attention(q, wrong, wrong, positions, out, scale=1.0)
    with pytest.raises(ValueError, match="window: expected at least 1"):
        gpu.causal_attention(q, kv, kv, positions, out, scale=1.0, window=0)
    with pytest.raises(ValueError, match="positions: expected torch.int64"):
        gpu.causal_attention(q, kv, kv, positions.int(), out, scale=1.0)
    with pytest.raises(ValueError, match="keys: expected torch.float32"):
        staging = torch.zeros(96, device=device, dtype=torch.bfloat16)
        gpu.staged_decode_attention(q, staging, positions, out, num_kv_heads=2, scale=1.0)
    with pytest.raises(ValueError, match="k_cache: expected head_dim 16"):
        cache, tables = torch.zeros(2, 2, 4, 8, device=device), torch.zeros(3, dtype=torch.int32, device=device)
        gpu.paged_decode_attention(q, cache, cache, tables, positions, out, scale=1.0)
