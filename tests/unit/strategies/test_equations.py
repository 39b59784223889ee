"""MoE-Lens's equations against the numbers that the paper prints, and against what they must do in the limit."""

from __future__ import annotations

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from strategies.moelens import equations as eq

MIXTRAL = {"h": 4096, "h_i": 14336, "s": 4}  # grouped-query attention: 32 heads share 8 KV heads
KV_BYTES_PER_TOKEN = 32 * 2 * 8 * 128 * 2  # Mixtral-8x7B in bfloat16: layers, K and V, KV heads, head dim

# Table 2, with the units that reproduce it: 1 TFLOP = 1024 GFLOP, 0.125 MB of KV a token, 1000 MB a GB.
TABLE_2 = [  # BF16 TFLOP/s, tokens printed, GB printed at 256 and 512 tokens
    ("A40", 150, 19_200, 614, 1228),
    ("L40", 181, 23_168, 741, 1482),
    ("A100", 312, 39_936, 1277, 2554),
]


@pytest.mark.parametrize(("gpu", "tflops", "tokens", "gb_256", "gb_512"), TABLE_2, ids=[row[0] for row in TABLE_2])
def test_table_2_in_the_units_of_the_paper(gpu, tflops, tokens, gb_256, gb_512):
    """2554 for the A100 is twice the truncated 1277; its own value is 2555.9. 39,936 is printed as 40.0k."""
    computed = eq.saturating_tokens(tflops * 1024e9, 32e9, experts=8, top_k=2)
    assert computed == tokens
    gb = [computed * length * 0.125 / 1000 for length in (256, 512)]
    assert int(gb[0]) == gb_256
    assert int(gb[1]) in (gb_512, gb_512 + 1)
    assert 2 * gb_256 == gb_512


def test_table_2_in_decimal_units():
    tokens = eq.saturating_tokens(150e12, 32e9, experts=8, top_k=2)
    assert tokens == 18_750
    assert int(tokens * 256 * KV_BYTES_PER_TOKEN / 1e9) == 629


def test_tokens_to_saturate_at_the_measured_link_rate():
    """150 TFLOP/s and the 19.5 GB/s of section 7: 30.8k."""
    assert round(eq.saturating_tokens(150e12, 19.5e9, experts=8, top_k=2), -2) == 30_800


def test_equation_1_by_hand():
    """Mixtral-8x7B: 6 N_k h h_i + 4h^2 + 4h^2/s FLOPs over the bytes with N_e in place of N_k."""
    active, stored = 6 * 2 * 4096 * 14336 + 5 * 4096**2, 6 * 8 * 4096 * 14336 + 5 * 4096**2
    assert eq.gemm_intensity(1000, top_k=2, experts=8, **MIXTRAL) == pytest.approx(1000 * active / stored)
    assert eq.gemm_intensity(1000, top_k=2, experts=8, **MIXTRAL) == pytest.approx(1000 * 2 / 8, rel=0.1)


@given(st.integers(1, 10**6), st.integers(1, 8), st.integers(8, 64))
def test_equation_1_lies_between_sparse_and_dense(n, top_k, experts):
    intensity = eq.gemm_intensity(n, top_k=top_k, experts=experts, **MIXTRAL)
    assert n * top_k / experts <= intensity * (1 + 1e-12)
    assert intensity <= n * (1 + 1e-12)


@given(st.integers(1, 2000), st.integers(1, 600))
def test_equation_3_is_close_to_its_closed_form(p, g):
    """The sum has g + 1 terms, the closed form drops one of them: it is the larger by at most a factor (g + 1) / g."""
    exact, closed = eq.parallelism_memory_efficiency(p, g), 2 * (p + g) / ((2 * p + g) * g)
    assert exact == pytest.approx((p + g) / ((g + 1) * (p + g / 2)))
    assert exact == pytest.approx(closed * g / (g + 1))


def test_equation_3_by_hand():
    assert eq.parallelism_memory_efficiency(98, 2) == pytest.approx(100 / (98 + 99 + 100))


@given(st.integers(1, 2000), st.integers(1, 600))
def test_longer_generation_uses_memory_less_efficiently(p, g):
    assert eq.parallelism_memory_efficiency(p, g + 1) < eq.parallelism_memory_efficiency(p, g)
    assert eq.parallelism_memory_efficiency(p, g) > eq.parallelism_memory_efficiency(0, g) / 2


def test_equation_4_is_bound_by_memory_and_then_by_the_gpu():
    memory, delta_s = 1e6, 5.0
    bound = eq.parallelism_memory_efficiency(98, 32) * memory / delta_s
    assert eq.stage1_tok_s(98, 32, kv_tokens=memory, delta_s=delta_s, gpu_tok_s=1e9) == bound
    assert eq.stage1_tok_s(98, 32, kv_tokens=memory, delta_s=delta_s, gpu_tok_s=100.0) == 100.0


def test_equations_5_and_6():
    """164 GB in all over 94 GB of weights at 19.5 GB/s: B_KV = 70/94 of the link beside the link itself."""
    assert eq.memory_bandwidth_needed(164e9, 94e9, 19.5e9) == pytest.approx(19.5e9 + 70 / 94 * 19.5e9)
    assert eq.cpu_flops_needed(4, 0.5, 10e9) == 40e9


@given(st.floats(1, 2000), st.floats(0, 600))
def test_equation_7_gains_at_most_a_factor_of_two(p, g):
    gain = eq.effective_kv_capacity(p, g, 1.0)
    assert 1 <= gain < 2
    assert eq.effective_kv_capacity(p, g, 70e9) == pytest.approx(70e9 * gain)


@given(st.integers(1, 300), st.integers(1, 200), st.integers(1, 10**5))
def test_equations_8_and_9_agree_with_equation_7(p, g, blocks):
    """With blocks of one token: g q sequences decode in parallel, against N / (p + g) with the phases apart."""
    q = eq.prefills_per_pass(p, g, num_blocks=blocks, block_size=1)
    apart = blocks / (p + g)
    assert g * q == pytest.approx(apart * eq.effective_kv_capacity(p, g, 1.0) * g / (g + 1))


@given(st.integers(1, 300), st.integers(1, 100), st.integers(1, 10**5), st.sampled_from((2, 4, 16, 64)))
def test_larger_blocks_admit_fewer(p, g, tokens, block_size):
    fine = eq.prefills_per_pass(p, g, num_blocks=tokens, block_size=1)
    coarse = eq.prefills_per_pass(p, g, num_blocks=tokens / block_size, block_size=block_size)
    assert coarse <= fine * (1 + 1e-12)
    assert coarse >= fine * p / (p + block_size - 1) * (1 - 1e-12)


def two(p=98.0, g=32, k=25_000, blocks=33_000, block=16, delta=4.8, tokens=30_000.0) -> eq.Stage2:
    return eq.stage2(p=p, g=g, num_requests=k, num_blocks=blocks, block_size=block, delta_s=delta, pass_tokens=tokens)


def test_equation_10_by_hand():
    """100 blocks of 1 token, p = 4, g = 1: 9 blocks a sequence over its two passes, so q = 100 / 9."""
    answer = two(p=4, g=1, k=1000, blocks=100, block=1, delta=2.0, tokens=1e9)
    assert answer.q == pytest.approx(100 / 9)
    assert answer.passes == pytest.approx(1000 / (100 / 9) + 1)
    assert answer.throughput_tok_s == pytest.approx(1000 / (91 * 2.0))
    assert answer.bound == "kv capacity"


def test_equations_11_to_13_by_hand():
    """p = 30, g = 10, 100 tokens a pass: 75 are prefill; 2g + (K p - g (75 + 100) / 2) / 75 passes."""
    answer = two(p=30, g=10, k=1000, blocks=10_000, block=1, delta=1.0, tokens=100)
    assert answer.q * 40 > 100, "the GPU is the limit"
    assert answer.passes == pytest.approx(20 + (30_000 - 875) / 75)
    assert answer.throughput_tok_s == pytest.approx(10_000 / answer.passes)
    assert answer.bound == "gpu"


@given(st.integers(1, 400), st.integers(1, 600), st.integers(1, 10**5), st.floats(10, 1e6), st.integers(64, 10**6))
def test_no_prediction_exceeds_what_gpu_and_workload_allow(p, g, k, tokens, blocks):
    """Unguarded, Equation 12 turns negative for long generations (AIME); each pass needs its share of the tokens."""
    answer = two(p=float(p), g=g, k=k, blocks=blocks, tokens=tokens)
    assert answer.passes > 0
    assert answer.throughput_tok_s == pytest.approx(k * g / (answer.passes * answer.pass_s))
    if answer.bound == "gpu":
        assert answer.passes >= k * (p + g) / tokens * (1 - 1e-12)
    if answer.bound != "workload":
        assert answer.passes >= k / answer.q + g - 1e-9, "Equation 14 takes the smaller throughput"


def test_the_guard_matters_for_aime():
    """AIME 2024: p = 128, g = 512, with few requests beside the capacity."""
    answer = two(p=128, g=512, k=2000, blocks=52_500, tokens=500.0)
    prefill = 500 * 128 / 640
    assert 1024 + (2000 * 128 - 512 * (prefill + 500) / 2) / prefill < 2000 * 640 / 500
    assert answer.passes >= 2000 * 640 / 500


@given(st.integers(1, 400), st.integers(1, 300), st.integers(1000, 10**6))
def test_stage_2_tends_to_stage_1(p, g, blocks):
    """Endless requests, blocks of one token, a GPU that never limits: T tends to T_max g / (p + g)."""
    answer = two(p=float(p), g=g, k=10**12, blocks=blocks, block=1, tokens=1e15)
    upper = eq.stage1_tok_s(p, g, kv_tokens=blocks, delta_s=4.8, gpu_tok_s=math.inf)
    assert answer.bound == "kv capacity"
    assert answer.throughput_tok_s == pytest.approx(upper * g / (p + g), rel=1e-3)


@given(st.integers(1, 400), st.integers(1, 300))
def test_stage_2_tends_to_the_rate_of_the_gpu(p, g):
    """Endless requests and memory: every pass carries all the tokens that the GPU can take."""
    answer = two(p=float(p), g=g, k=10**12, blocks=10**12, tokens=1000.0)
    assume(answer.bound != "workload")
    assert answer.bound == "gpu"
    assert answer.throughput_tok_s == pytest.approx(1000 / 4.8 * g / (p + g), rel=1e-3)


@given(st.integers(1, 300), st.integers(1, 200), st.integers(500, 10**6), st.integers(1, 10**5), st.floats(100, 1e6))
def test_more_memory_or_a_faster_gpu_never_lowers_the_prediction(p, g, k, blocks, tokens):
    assume(k * math.ceil((p + g) / 16) > 2 * blocks)  # what fits the cache as a whole is another regime
    base = two(p=float(p), g=g, k=k, blocks=blocks, tokens=tokens)
    more_memory = two(p=float(p), g=g, k=k, blocks=2 * blocks, tokens=1e15)
    assert more_memory.throughput_tok_s >= two(p=float(p), g=g, k=k, blocks=blocks, tokens=1e15).throughput_tok_s
    assert two(p=float(p), g=g, k=k, blocks=blocks, tokens=1e15).throughput_tok_s >= base.throughput_tok_s * (1 - 1e-9)
    assert two(p=float(p), g=g, k=k, blocks=blocks, tokens=tokens, delta=2.4).throughput_tok_s == pytest.approx(
        2 * base.throughput_tok_s
    ), "half the transfer time at the same tokens a pass"
