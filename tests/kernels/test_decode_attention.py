"""decode_attention against the float64 oracle, on every code path."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from paged import DTYPES, PagedCase, paged_case

import kernels
from kernels import reference

# float32 accumulation over up to a few hundred tokens, values of order 1.
TOLERANCE = 4e-6

per_isa = settings(
    max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], derandomize=True
)


def run(case: PagedCase, out_dtype: torch.dtype = torch.float32, **options) -> torch.Tensor:
    out = torch.full(case.q.shape, float("nan"), dtype=out_dtype)
    kernels.decode_attention(*case.arguments, out, scale=case.scale, **options)
    return out


def worst_error(case: PagedCase, out: torch.Tensor, **options) -> float:
    expected = reference.decode_attention(*case.arguments, scale=case.scale, **options)
    return float((out.double() - expected).abs().max()) if expected.numel() else 0.0


@per_isa
@given(
    lengths=st.lists(st.integers(0, 70), min_size=1, max_size=4),
    num_kv_heads=st.integers(1, 3),
    group=st.integers(1, 9),
    head_dim=st.sampled_from([1, 8, 20, 48, 64, 80, 96, 128, 192, 256]),
    block_size=st.sampled_from([1, 3, 16, 32]),
    kv=st.sampled_from(list(DTYPES)),
    query=st.sampled_from(list(DTYPES)),
    sliding_window=st.sampled_from([0, 1, 17, 40]),
    with_sinks=st.booleans(),
    num_threads=st.sampled_from([1, 2, 3]),
    seed=st.integers(0, 1000),
)
def test_matches_the_oracle(
    isa, lengths, num_kv_heads, group, head_dim, block_size, kv, query, sliding_window, with_sinks, num_threads, seed
):
    case = paged_case(
        lengths, num_kv_heads=num_kv_heads, group=group, head_dim=head_dim, block_size=block_size,
        kv_dtype=DTYPES[kv], q_dtype=DTYPES[query], seed=seed,
    )  # fmt: skip
    sinks = torch.randn(num_kv_heads * group) if with_sinks else None
    out = run(case, sliding_window=sliding_window, sinks=sinks, num_threads=num_threads)
    assert worst_error(case, out, sliding_window=sliding_window, sinks=sinks) < TOLERANCE


@per_isa
@given(
    lengths=st.lists(st.integers(0, 300), min_size=1, max_size=3),
    num_kv_heads=st.integers(1, 3),
    group=st.sampled_from([4, 5, 6, 7, 8, 9, 16, 17]),
    head_dim=st.sampled_from([32, 64, 96, 128]),
    block_size=st.sampled_from([1, 16, 24, 32]),
    sliding_window=st.sampled_from([0, 1, 40, 150]),
    with_sinks=st.booleans(),
    out_dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    num_threads=st.sampled_from([1, 2]),
    seed=st.integers(0, 1000),
)
def test_groups_of_bfloat16_heads(
    isa, lengths, num_kv_heads, group, head_dim, block_size, sliding_window, with_sinks, out_dtype, num_threads, seed
):
    """Tiles take those of 5 heads and more, several blocks at a time."""
    case = paged_case(
        lengths, num_kv_heads=num_kv_heads, group=group, head_dim=head_dim, block_size=block_size, seed=seed
    )
    options = {"sliding_window": sliding_window, "sinks": torch.randn(num_kv_heads * group) if with_sinks else None}
    out = run(case, out_dtype, num_threads=num_threads, **options)
    exact = reference.decode_attention(*case.arguments, scale=case.scale, **options)
    rounding = 2.0**-8 * float(exact.abs().max()) if out_dtype == torch.bfloat16 else 0.0
    assert worst_error(case, out, **options) < TOLERANCE + rounding


@pytest.mark.parametrize("group", [4, 6, 8, 12])
@pytest.mark.parametrize("num_threads", [1, 2, 4])
def test_long_context_split_merges_exactly(isa, num_threads, group):
    case = paged_case([2500, 3], num_kv_heads=1, group=group, head_dim=64)
    assert worst_error(case, run(case, num_threads=num_threads)) < TOLERANCE


@pytest.mark.parametrize("group", [3, 12])
@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("kv", list(DTYPES))
def test_last_blocks_of_every_length(isa, kv, block_size, group):
    case = paged_case(list(range(1, 40)), group=group, block_size=block_size, kv_dtype=DTYPES[kv])
    assert worst_error(case, run(case)) < TOLERANCE


@pytest.mark.parametrize("num_kv_heads", [3, 5, 7])
@pytest.mark.parametrize("num_threads", [2, 4])
def test_heads_are_shared_out_to_threads_without_rest(isa, num_kv_heads, num_threads):
    """Too short to be cut over the context, so over the heads; into three pieces of five, for one."""
    for length in (210, 250):
        case = paged_case([length], num_kv_heads=num_kv_heads, group=2)
        assert worst_error(case, run(case, num_threads=num_threads)) < TOLERANCE


def test_exp_is_exact_to_2e_7(isa):
    """Of two tokens with scores 0 and x the second has the weight e^x / (1 + e^x); a sum, a division and a rounding
    add a bit each."""
    x = torch.linspace(-80, 0, 20_001)
    keys = torch.zeros(len(x), 1, 2, 8)
    keys[:, 0, 1, 0] = x
    values = torch.zeros_like(keys)
    values[:, :, 1] = 1.0
    blocks, lengths = torch.arange(len(x), dtype=torch.int32)[:, None], torch.full((len(x),), 2, dtype=torch.int32)
    out = torch.empty(len(x), 1, 8)
    kernels.decode_attention(torch.ones(len(x), 1, 8), keys, values, blocks, lengths, out, scale=1.0)
    exact = x.double().exp() / (1 + x.double().exp())
    assert float((out[:, 0, 0].double() / exact - 1).abs().max()) < 2e-7 + 3 * 2.0**-24


def test_zero_length_gives_zeros(isa):
    out = run(paged_case([0, 5, 0]))
    assert torch.all(out[0] == 0) and torch.all(out[2] == 0) and torch.all(out[1] != 0)


def test_nothing_to_do(isa):
    no_heads, no_seqs = paged_case([5, 0], group=0), paged_case([])
    assert run(no_heads).shape == (2, 0, 64)
    assert run(no_seqs).shape == (0, 8, 64)


def test_large_logits_do_not_overflow(isa):
    case = paged_case([50, 33], magnitude=60.0, kv_dtype=torch.float32, q_dtype=torch.float32)
    out = run(case)
    assert torch.isfinite(out).all()
    assert worst_error(case, out) < 60 * 1e-3  # logits of 3e4 carry float32 errors of 2e-3


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("group", [1, 7, 48, 71])
def test_wide_groups(isa, group, head_dim):
    case = paged_case([40, 17], group=group, head_dim=head_dim)
    assert worst_error(case, run(case, num_threads=2)) < TOLERANCE


@pytest.mark.parametrize("group", [4, 6, 8, 12])
@pytest.mark.parametrize("slope", [0.02, 0.3, -0.3])
def test_scores_that_rise_along_the_context(isa, group, slope):
    """Running maxima stay for a while and then follow, on each KV head on their own."""
    case = paged_case([500, 70, 3], group=group)
    case.q[..., 0] = case.q.shape[2] ** 0.5  # times the scale: 1
    for seq, length in enumerate(case.context_lens.tolist()):
        for token in range(length):
            rise = torch.tensor([slope * token, slope * (token % 100)])  # the second KV head's scores fall back
            case.k_cache[case.block_tables[seq, token // 16], :, token % 16, 0] = rise.bfloat16()
    # A logit of 150 is a sum of 1200 before it is scaled: each of the sum's roundings, up to 64, is up to 8e-6 of it.
    assert worst_error(case, run(case)) < 50 * TOLERANCE


@pytest.mark.parametrize("group", [3, 6, 8, 12])
def test_an_infinite_value_makes_its_column_infinite(isa, group):
    case = paged_case([70, 20], group=group)
    case.v_cache[case.block_tables[0, 2], :, 5, 3] = float("inf")
    out = run(case)
    assert (out[0, :, 3] == float("inf")).all()
    out[0, :, 3] = 0.0
    assert out.isfinite().all()


@pytest.mark.parametrize("group", [3, 6, 12])
@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("kv", list(DTYPES))
def test_tokens_with_scores_of_minus_infinity_have_no_weight(isa, kv, num_threads, group):
    case = paged_case([600, 20, 9], group=group, kv_dtype=DTYPES[kv])
    case.q[..., 0] = 1.0
    masked = torch.rand(600, generator=torch.Generator().manual_seed(0)) < 0.5
    masked[300:] = True  # whole tiles
    for seq, tokens in enumerate([masked.nonzero()[:, 0].tolist(), [0, 19], range(9)]):
        for token in tokens:
            case.k_cache[case.block_tables[seq, token // 16], :, token % 16, 0] = -float("inf")
    out = run(case, num_threads=num_threads)
    assert worst_error(case, out) < TOLERANCE
    assert torch.all(out[2] == 0)


@pytest.mark.parametrize("kv", list(DTYPES))
def test_denormal_keys_and_values(isa, kv):
    case = paged_case([33, 5], kv_dtype=DTYPES[kv], q_dtype=torch.float32)
    smallest = {"bf16": 2.0**-133, "fp16": 2.0**-24, "fp32": 2.0**-149}[kv]
    for cache in (case.k_cache, case.v_cache):
        cache.mul_(0).add_(torch.randint(-9, 10, cache.shape) * smallest)  # NaN outside the sequences stays NaN
    expected = reference.decode_attention(*case.arguments, scale=case.scale)
    out = run(case)
    assert torch.all(out.abs() <= 9 * smallest)
    assert worst_error(case, out) <= max(2 * smallest if kv == "fp32" else 0.0, 1e-5 * float(expected.abs().max()))


def test_half_precision_denormals_survive_flushing(isa):
    values = (torch.arange(1, 65) * 2.0**-24).half()
    cache = values.expand(1, 1, 4, 64).contiguous()
    case = PagedCase(torch.zeros(1, 1, 64), cache, cache, torch.zeros(1, 1).int(), torch.tensor([4]).int(), 1.0)
    assert torch.set_flush_denormal(True)
    try:
        out = run(case)
    finally:
        torch.set_flush_denormal(False)
    assert torch.allclose(out[0, 0], values.float(), rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("num_threads", [1, 3])
def test_blocks_that_end_beyond_the_greatest_int(isa, num_threads):
    """A block of 2^30 tokens used twice, in memory of which only the attended pages are ever touched."""
    block_size, window = 2**30, 700
    cache = torch.empty(1, 1, block_size, 1, dtype=torch.bfloat16)
    last = cache[0, 0, -window - 1 : -1, 0]  # tokens of the second block: the context ends one before its end
    last.copy_(torch.randn(window, generator=torch.Generator().manual_seed(0)))
    table = torch.tensor([[0, 0, -(2**31)]], dtype=torch.int32)[:, :2]
    lengths = torch.tensor([2**31 - 1], dtype=torch.int32)
    out = torch.empty(1, 1, 1)
    kernels.decode_attention(
        torch.ones(1, 1, 1), cache, cache, table, lengths, out, scale=1.0, sliding_window=window,
        num_threads=num_threads,
    )  # fmt: skip
    exact = last.double()
    assert abs(float(out) - float(exact.softmax(0) @ exact)) < TOLERANCE


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_output_in_the_query_dtype_is_the_rounded_float32_output(isa, dtype):
    case = paged_case([40, 7], q_dtype=dtype)
    assert torch.equal(run(case, dtype), run(case).to(dtype))


@pytest.mark.parametrize("group", [4, 12])
def test_strided_queries_and_outputs(isa, group):
    case = paged_case([20, 9, 31], group=group)
    wide_q = torch.randn(3, 3 * case.q[0].numel()).to(case.q.dtype)
    wide_out = torch.full((3, 2 * case.q[0].numel()), 7.0)
    q = wide_q[:, : case.q[0].numel()].view(case.q.shape)
    q.copy_(case.q)
    out = wide_out[:, : case.q[0].numel()].view(case.q.shape)
    kernels.decode_attention(q, *case.arguments[1:], out, scale=case.scale)
    assert torch.equal(out, run(case))
    assert torch.all(wide_out[:, case.q[0].numel() :] == 7.0)


@per_isa
@given(
    head_dim=st.sampled_from([64, 80, 128]),
    group=st.sampled_from([1, 3, 4, 8, 9, 16]),
    length=st.integers(1, 60),
    seed=st.integers(0, 100),
)
def test_bf16_round_rounds_each_dot_product(isa, head_dim, group, length, seed):
    case = paged_case([length], head_dim=head_dim, group=group, seed=seed)
    out = run(case, mode="bf16_round")
    assert torch.equal(out, out.bfloat16().float())
    # A score within float32 error of a rounding boundary may fall on the other side (one bf16 step of a score of
    # about 8 is 2^-5, scaled), and the output's own rounding may then flip too.
    assert worst_error(case, out, bf16_round=True) < 2.0**-6
    exact = reference.decode_attention(*case.arguments, scale=case.scale, bf16_round=True)
    assert float((out.double() != exact).double().mean()) < 0.05


def test_bf16_round_differs_from_float32():
    case = paged_case([60])
    assert not torch.equal(run(case, mode="bf16_round"), run(case).bfloat16().float())
