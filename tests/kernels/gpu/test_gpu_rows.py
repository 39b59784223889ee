"""Norms, rotary embedding, rows kept in a cache and foreseen experts on the device, against the model's own math."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from harness.model import functional
from harness.model.dimensions import Router
from kernels import triton as gpu

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
quick = settings(max_examples=12)
seeds = st.integers(0, 10**6)


def drawn(device, dtype, *shape, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * scale).to(dtype).to(device)


def close(found, expected, *, of=1.0, least=0.0):
    """Check that roundings are the same. Float32 sums may be in another order, which moves some 16-bit numbers by one
    step and their products by two; Triton's interpreter cuts bfloat16 off, where a GPU rounds. `of` is the size of what
    was summed."""
    step = {torch.float32: 2e-6, torch.bfloat16: 2**-6, torch.float16: 2**-9}[found.dtype]
    step = max(step, least)
    step *= 2 if found.dtype is torch.bfloat16 and not found.is_cuda else 1
    torch.testing.assert_close(found.cpu(), expected.cpu(), rtol=step, atol=step * 1e-2 * of)


@quick
@given(
    num_tokens=st.integers(0, 20), num_heads=st.integers(0, 5), width=st.integers(1, 300),
    dtype=st.sampled_from(DTYPES), stride=st.integers(0, 3), seed=seeds,
)  # fmt: skip
@example(3, 0, 4096, torch.bfloat16, 0, 0)
def test_norms_are_the_model_s(device, num_tokens, num_heads, width, dtype, stride, seed):
    """Of hidden states where there are no heads, and else of the heads of a projection that has more beside them."""
    weight = drawn(device, dtype, width, seed=seed + 1)
    if num_heads:
        wide = drawn(device, dtype, num_tokens, num_heads * width + stride, seed=seed, scale=3.0)
        x = wide[:, : num_heads * width].unflatten(-1, (num_heads, width))
    else:
        x = drawn(device, dtype, num_tokens, width + stride, seed=seed, scale=3.0)[:, :width]
    found = gpu.rms_norm(x, weight, 0.01)
    assert found.is_contiguous() and found.shape == x.shape
    close(found, functional.rms_norm(x.cpu(), weight.cpu(), 0.01))


@quick
@given(
    num_tokens=st.integers(0, 9), q_heads=st.integers(1, 9), k_heads=st.integers(1, 5), half=st.integers(1, 70),
    dtype=st.sampled_from(DTYPES), beside=st.integers(0, 3), seed=seeds,
)  # fmt: skip
@example(2, 80, 8, 64, torch.bfloat16, 0, 0)  # more heads than one program takes
def test_rotary_embedding_is_the_model_s(device, num_tokens, q_heads, k_heads, half, dtype, beside, seed):
    projected = drawn(device, dtype, num_tokens, (q_heads + k_heads) * 2 * half + beside, seed=seed)
    q, k, _ = projected.split((q_heads * 2 * half, k_heads * 2 * half, beside), dim=-1)
    q, k = q.unflatten(-1, (q_heads, 2 * half)), k.unflatten(-1, (k_heads, 2 * half))
    positions = torch.randint(0, 50, (num_tokens,), generator=torch.Generator().manual_seed(seed))
    tables = functional.rope_tables(1e4, 2 * half, 50, dtype, torch.device("cpu"))
    found = gpu.rotate(q, k, positions.to(device), *(table.to(device) for table in tables))
    cos, sin = (table[positions] for table in tables)
    for ours, x in zip(found, (q, k), strict=True):
        assert ours.is_contiguous()
        close(ours, functional.apply_rope(x.cpu(), cos, sin), of=100.0)


@quick
@given(
    num_tokens=st.integers(0, 12), heads=st.integers(1, 5), width=st.integers(1, 90), block_size=st.integers(1, 17),
    layers=st.integers(1, 2), dtype=st.sampled_from(DTYPES), seed=seeds,
)  # fmt: skip
def test_rows_go_to_their_slots_and_nothing_else_changes(
    device, num_tokens, heads, width, block_size, layers, dtype, seed
):
    num_blocks = num_tokens + 1
    whole = drawn(device, dtype, num_blocks, layers, heads, block_size, width, seed=seed)
    new = drawn(device, dtype, num_tokens, heads, width, seed=seed + 1)
    generator = torch.Generator().manual_seed(seed)
    slots = torch.randperm(num_blocks * block_size, generator=generator)[:num_tokens]
    expected = whole.clone()
    expected[:, -1][slots.to(device) // block_size, :, slots.to(device) % block_size] = new
    gpu.append_rows(new, slots.to(device), whole[:, -1])
    assert torch.equal(whole, expected)


@quick
@given(
    num_tokens=st.integers(0, 20), num_experts=st.integers(2, 70), share=st.floats(0, 1), more=st.integers(0, 4),
    dtype=st.sampled_from(DTYPES), scoring=st.sampled_from(("softmax", "sigmoid")), has_bias=st.booleans(),
    spread=st.sampled_from((0.01, 1.0, 8.0)), seed=seeds,
)  # fmt: skip
@example(16, 8, 0.25, 0, torch.bfloat16, "softmax", False, 1.0, 0)  # Mixtral
def test_foreseen_experts_are_the_model_s(
    device, num_tokens, num_experts, share, more, dtype, scoring, has_bias, spread, seed
):
    top_k = max(1, min(8, round(share * num_experts)))
    count = min(num_experts, top_k + more)
    logits = drawn(device, dtype, num_tokens, num_experts, seed=seed, scale=spread)
    bias = drawn(device, torch.float32, num_experts, seed=seed + 1, scale=0.1) if has_bias else None
    ids, chances = gpu.foresee_experts(
        logits, count, top_k, steepness=functional.STEEPNESS, least=functional.LEAST_SHARE, scoring=scoring,
        choice_bias=bias,
    )  # fmt: skip
    router = Router(scoring=scoring)
    own_bias = None if bias is None else bias.cpu()
    every, its = functional.foresee_experts(logits.cpu(), num_experts, top_k, router, own_bias)
    expected = torch.zeros(num_tokens, num_experts).scatter(1, every, its)
    assert all(len(set(row)) == count for row in ids.tolist())
    grows = scoring == "sigmoid" or has_bias  # a last digit of a score by as much as its share does
    least = 1e-3 if grows else 1e-5
    close(chances, expected.gather(1, ids.cpu()) if num_tokens else chances.cpu(), least=least)
    close(chances, its[:, :count], least=least)  # they are the likeliest, in their order


def test_what_does_not_fit_is_named(device):
    x, weight = drawn(device, torch.float32, 3, 8), drawn(device, torch.float32, 8)
    with pytest.raises(ValueError, match="^x: expected"):
        gpu.rms_norm(x.t(), weight, 1.0)
    with pytest.raises(ValueError, match="^weight: expected"):
        gpu.rms_norm(x, weight.half(), 1.0)
    q, table = drawn(device, torch.float32, 3, 2, 8), drawn(device, torch.float32, 5, 1, 4)
    positions = torch.zeros(3, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match="^k: expected"):
        gpu.rotate(q, q[:2], positions, table, table)
    with pytest.raises(ValueError, match="^sin: expected"):
        gpu.rotate(q, q, positions, table, table[:4])
    with pytest.raises(ValueError, match="^slots: expected"):
        gpu.append_rows(q, positions[:2], drawn(device, torch.float32, 4, 2, 16, 8))
    with pytest.raises(ValueError, match="^cache: expected"):
        gpu.append_rows(q, positions, drawn(device, torch.float32, 4, 16, 2, 8).transpose(1, 2))
    with pytest.raises(ValueError, match="^count: expected"):
        gpu.foresee_experts(x, 9, 2, steepness=1.0, least=1e-9)
