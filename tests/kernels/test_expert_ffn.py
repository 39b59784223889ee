"""expert_ffn against the float64 oracle: every code path, activation, layout and dtype."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kernels
from kernels import gemm, reference
from kernels._extension import native

ACTIVATIONS = ["silu", "gelu", "gelu_tanh", "clamped_swiglu"]
NARROW = [torch.bfloat16, torch.float16]  # types of weights
UNIT = 2.0**-8  # relative rounding of bfloat16; float16 rounds less


def weights(
    hidden: int, expert_dim: int, layout: str, generator: torch.Generator, dtype: torch.dtype = torch.bfloat16
) -> tuple[torch.Tensor, ...]:
    """gate, up, down of unit gain; gate and up as a fused tensor gives them, rows longer than needed."""
    fused = (torch.randn(2 * expert_dim, hidden + 5, generator=generator) / hidden**0.5).to(dtype)[:, :hidden]
    down = (torch.randn(hidden, expert_dim + 3, generator=generator) / expert_dim**0.5).to(dtype)[:, :expert_dim]
    if layout == "interleaved":
        return fused[0::2], fused[1::2], down
    return fused[:expert_dim], fused[expert_dim:], down


def error(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out.double() - expected).abs().max()) if out.numel() else 0.0


@settings(
    max_examples=60, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(
    num_tokens=st.integers(0, 20),
    hidden=st.integers(1, 140),
    expert_dim=st.integers(1, 140),
    layout=st.sampled_from(["stacked", "interleaved"]),
    w_dtype=st.sampled_from(NARROW),
    x_is_narrow=st.booleans(),
    out_is_narrow=st.booleans(),
    activation=st.sampled_from(ACTIVATIONS),
    bias_dtype=st.sampled_from([None, torch.float32, *NARROW]),
    weighted=st.booleans(),
    accumulate=st.booleans(),
    num_threads=st.integers(1, 3),
    seed=st.integers(0, 1000),
)
def test_matches_the_oracle(
    isa, num_tokens, hidden, expert_dim, layout, w_dtype, x_is_narrow, out_is_narrow, activation, bias_dtype, weighted,
    accumulate, num_threads, seed,
):  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    x_dtype, out_dtype = (w_dtype if is_narrow else torch.float32 for is_narrow in (x_is_narrow, out_is_narrow))
    gate, up, down = weights(hidden, expert_dim, layout, generator, w_dtype)
    x = torch.randn(num_tokens, 2 * hidden, generator=generator).to(x_dtype)[:, :hidden]
    biases = {}
    if bias_dtype is not None:
        sizes = {"gate_bias": expert_dim, "up_bias": expert_dim, "down_bias": hidden}
        biases = {name: torch.randn(2 * size, generator=generator).to(bias_dtype)[::2] for name, size in sizes.items()}
    row_weights = torch.rand(num_tokens, generator=generator) if weighted else None
    wide = torch.randn(num_tokens, hidden + 3, generator=generator).to(out_dtype)
    before = wide.clone()
    gating = kernels.Gating(activation=activation, **biases)
    kernels.expert_ffn(
        x, gate, up, down, wide[:, :hidden], row_weights=row_weights, gating=gating, accumulate=accumulate,
        num_threads=num_threads, method="kernel",
    )  # fmt: skip
    expected = reference.expert_ffn(x, gate, up, down, row_weights=row_weights, activation=activation, **biases)
    if accumulate:
        expected += before[:, :hidden].double()
    size = float(expected.abs().max()) if expected.numel() else 0.0
    assert error(wide[:, :hidden], expected) <= 2e-5 + (
        (UNIT if w_dtype is torch.bfloat16 else UNIT / 8) * size if out_is_narrow else 0.0
    )
    assert torch.equal(wide[:, hidden:], before[:, hidden:]), "wrote outside its output"


@pytest.mark.parametrize("num_tokens", [1, 6, 7, 65, 66, 67, 140, 530])
@pytest.mark.parametrize(
    ("hidden", "expert_dim", "dtype"),
    [(64, 70, torch.bfloat16), (1100, 70, torch.bfloat16), (1100, 70, torch.float16), (64, 2150, torch.bfloat16)],
)
def test_many_tokens_and_deep_rows(isa, num_tokens, hidden, expert_dim, dtype):
    """Across the borders of register groups, cache chunks, panels and slabs of tokens."""
    generator = torch.Generator().manual_seed(num_tokens)
    gate, up, down = weights(hidden, expert_dim, "stacked", generator, dtype)
    x = torch.randn(num_tokens, hidden, generator=generator)
    row_weights = torch.rand(num_tokens, generator=generator)
    out = torch.empty(num_tokens, hidden)
    kernels.expert_ffn(x, gate, up, down, out, row_weights=row_weights, num_threads=2)
    assert error(out, reference.expert_ffn(x, gate, up, down, row_weights=row_weights)) < 2e-5


@pytest.mark.parametrize("num_tokens", [1, 7, 9])  # which tiles hold in different ways
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_extreme_activations(isa, activation, num_tokens):
    """Identity projections show the activation itself, from denormals to where e^x overflows."""
    values = torch.tensor([0.0, -0.0, 1e-40, -1e-40, 1e-4, -1e-4, 0.5, -0.5, 3, -3, 6.9, 7.1, -7.1, 12, -12, 60, -60])
    values = torch.cat([values, torch.tensor([88.0, -88, 90, -90, 200, -200, 1e4, -1e4, 3e10, -3e10, 1e30, -1e30])])
    n = len(values)
    identity = torch.eye(n).bfloat16()
    for up_value in (1.0, -9.0):
        up_bias = torch.full((n,), up_value)
        out = torch.empty(num_tokens, n)
        gating = kernels.Gating(activation=activation, up_bias=up_bias)
        kernels.expert_ffn(
            values.repeat(num_tokens, 1), identity, torch.zeros(n, n).bfloat16(), identity, out, gating=gating
        )
        expected = torch.from_numpy(reference.gated(values.double().numpy(), up_bias.double().numpy(), activation))
        # The normal distribution is approximated to 8e-8 (activation.h), whatever remains of its product with the gate.
        approximation = 1e-7 * (values * up_value).double().abs() if activation == "gelu" else 0.0
        assert ((out.double() - expected).abs() <= 2e-7 + 2e-6 * expected.abs() + approximation).all()


@pytest.mark.parametrize("num_tokens", [3, 18])
def test_nan_passes_and_stays_in_its_token(isa, num_tokens):
    x = torch.ones(num_tokens, 40)
    x[1, 39] = float("nan")
    weight = torch.ones(40, 40).bfloat16()
    for activation in ACTIVATIONS:
        out = torch.empty(num_tokens, 40)
        kernels.expert_ffn(x, weight, weight, weight, out, gating=kernels.Gating(activation=activation))
        assert out[1].isnan().all() and out[0].isfinite().all() and out[2:].isfinite().all()


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(
    ("accumulate", "dtype"), [(False, torch.bfloat16), (True, torch.bfloat16), (True, torch.float16)]
)
def test_gemm_agrees_up_to_rounding_of_the_weights_dtype(activation, accumulate, dtype):
    generator = torch.Generator().manual_seed(1)
    gate, up, down = weights(96, 80, "stacked", generator, dtype)
    x = torch.randn(30, 96, generator=generator).to(dtype)
    gating = kernels.Gating(activation=activation, gate_bias=torch.randn(80), down_bias=torch.randn(96))
    outs = [torch.ones(30, 96) for _ in range(2)]
    for out, method in zip(outs, ("kernel", "gemm"), strict=True):
        kernels.expert_ffn(
            x, gate, up, down, out, row_weights=torch.linspace(0, 1, 30), gating=gating, accumulate=accumulate,
            method=method,
        )  # fmt: skip
    assert not torch.equal(*outs)
    unit = UNIT if dtype is torch.bfloat16 else UNIT / 8
    assert error(outs[1], outs[0].double()) < 8 * unit * float(outs[0].abs().max())


@settings(
    max_examples=60, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(
    counts=st.lists(st.sampled_from([0, 1, 2, 5, 8, 17, 70, 529]), min_size=0, max_size=6),
    hidden=st.sampled_from([1, 40, 96, 600]),
    expert_dim=st.sampled_from([1, 33, 80]),
    dtype=st.sampled_from(NARROW),
    x_is_narrow=st.booleans(),
    biased=st.booleans(),
    weighted=st.booleans(),
    accumulate=st.booleans(),
    num_threads=st.integers(1, 3),
    method=st.sampled_from(["kernel", "auto"]),
)
def test_experts_together_give_the_bits_that_each_gives_alone(
    isa, counts, hidden, expert_dim, dtype, x_is_narrow, biased, weighted, accumulate, num_threads, method
):
    generator = torch.Generator().manual_seed(len(counts))
    matrices = [weights(hidden, expert_dim, "interleaved", generator, dtype) for _ in counts]
    gatings = [
        kernels.Gating(activation="gelu", up_bias=torch.randn(expert_dim, generator=generator) if biased else None)
        for _ in counts
    ]
    x = torch.randn(sum(counts), hidden + 2, generator=generator).to(dtype if x_is_narrow else torch.float32)[:, 1:-1]
    row_weights = torch.rand(sum(counts), generator=generator) if weighted else None
    together, alone = torch.ones(sum(counts), hidden), torch.ones(sum(counts), hidden)
    experts = [kernels.ExpertWeights(*three, gating) for three, gating in zip(matrices, gatings, strict=True)]
    options = {"accumulate": accumulate, "num_threads": num_threads, "method": method}
    kernels.expert_ffns(x, counts, experts, together, row_weights=row_weights, **options)
    start = 0
    for count, three, gating in zip(counts, matrices, gatings, strict=True):
        mine = slice(start, start + count)
        rows = None if row_weights is None else row_weights[mine]
        kernels.expert_ffn(x[mine], *three, alone[mine], row_weights=rows, gating=gating, **options)
        start += count
    assert torch.equal(together, alone)


@pytest.mark.parametrize("num_threads", [2, 3])
def test_many_experts_of_many_sizes(isa, num_threads):
    """More experts than threads, and than have a place for their intermediate results at a time."""
    generator = torch.Generator().manual_seed(3)
    counts = [1, 300, 0, 2, 528, 40, 9, 700, 1, 1]
    experts = [kernels.ExpertWeights(*weights(640, 900, "stacked", generator)) for _ in counts]
    x = torch.randn(sum(counts), 640, generator=generator)
    out = torch.empty(sum(counts), 640)
    for _ in range(3):
        kernels.expert_ffns(x, counts, experts, out.fill_(7), num_threads=num_threads)
    start = 0
    for count, expert in zip(counts, experts, strict=True):
        some = slice(start, start + min(count, 5))
        expected = reference.expert_ffn(x[some], expert.gate, expert.up, expert.down)
        assert error(out[some], expected) < 2e-5
        last = slice(start + count - min(count, 2), start + count)
        assert error(out[last], reference.expert_ffn(x[last], expert.gate, expert.up, expert.down)) < 2e-5
        start += count


def test_arguments_of_several_experts_are_checked():
    small, other = (kernels.ExpertWeights(*(torch.zeros(n, n).bfloat16(),) * 3) for n in (16, 8))
    clamped = kernels.ExpertWeights(*(small.gate,) * 3, kernels.Gating(activation="gelu"))
    x, out = torch.zeros(3, 16), torch.zeros(3, 16)
    for counts, experts, named in (
        ([1, 1], [small, small], "counts"), ([4, -1], [small, small], "counts"), ([3], [small, small], "counts"),
        ([2, 1], [small, other], "experts"), ([2, 1], [small, clamped], "experts"), ([3], [other], "x"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"^{named}: "):
            kernels.expert_ffns(x, counts, experts, out)
    shared = torch.zeros(32, 16).bfloat16()
    with pytest.raises(ValueError, match="^out: overlaps down in memory"):
        within = kernels.ExpertWeights(small.gate, small.up, shared[16:])
        kernels.expert_ffns(x.bfloat16(), [0, 3], [small, within], shared[15:18])


def test_gemm_threshold(monkeypatch):
    monkeypatch.setenv(gemm.THRESHOLD_VARIABLE, "40")
    assert gemm.gemm_from_tokens(1) == 40
    monkeypatch.setenv(gemm.THRESHOLD_VARIABLE, "never")
    assert gemm.gemm_from_tokens(1) is None
    monkeypatch.setenv(gemm.THRESHOLD_VARIABLE, "often")
    with pytest.raises(ValueError, match=f"^{gemm.THRESHOLD_VARIABLE}: "):
        gemm.gemm_from_tokens(1)


@pytest.mark.parametrize("count", [39, 40])
def test_torch_computes_an_expert_from_the_threshold_on(monkeypatch, count):
    monkeypatch.setenv(gemm.THRESHOLD_VARIABLE, "40")
    expert = kernels.ExpertWeights(*weights(96, 96, "stacked", torch.Generator().manual_seed(4)))
    x = torch.randn(count + 2, 96, generator=torch.Generator().manual_seed(5)).bfloat16()
    outs = {}
    for method in ("auto", "kernel", "gemm"):
        outs[method] = torch.empty(x.shape)
        kernels.expert_ffns(x, [count, 2], [expert, expert], outs[method], method=method)
    assert not torch.equal(outs["kernel"][:count], outs["gemm"][:count])
    assert torch.equal(outs["auto"][:count], outs["gemm" if count >= 40 else "kernel"][:count])
    assert torch.equal(outs["auto"][count:], outs["kernel"][count:])


@pytest.mark.parametrize(
    ("path", "num_threads", "least"),
    [("avx512bf16", 1, 32), ("avx512bf16", 2, 64), ("avx512bf16", 64, 64), ("amx", 1, None), ("avx512", 2, None),
     ("avx2", 1, None), ("portable", 1, None)],
)  # fmt: skip
def test_torch_is_taken_where_it_was_measured_to_be_faster(monkeypatch, path, num_threads, least):
    monkeypatch.delenv(gemm.THRESHOLD_VARIABLE, raising=False)
    monkeypatch.setattr(gemm, "isa", lambda: path)
    assert gemm.gemm_from_tokens(num_threads) == least


@pytest.mark.parametrize("method", ["kernel", "gemm", "auto"])
@pytest.mark.parametrize("accumulate", [False, True])
def test_parameters_leave_no_graph(monkeypatch, method, accumulate):
    monkeypatch.setenv(gemm.THRESHOLD_VARIABLE, "1")
    gate, up, down = (torch.nn.Parameter(torch.ones(16, 16).bfloat16()) for _ in range(3))
    bias = torch.nn.Parameter(torch.ones(16))
    out = torch.zeros(3, 16)
    gating = kernels.Gating(down_bias=bias)
    kernels.expert_ffn(
        torch.ones(3, 16).bfloat16(), gate, up, down, out, gating=gating, accumulate=accumulate, method=method
    )
    assert out.any() and not out.requires_grad


def test_equals_the_layers_of_mixtral():
    """Against torch's own float32 operators, as transformers composes them."""
    generator = torch.Generator().manual_seed(2)
    gate, up, down = weights(128, 224, "stacked", generator)
    x, out = torch.randn(9, 128, generator=generator), torch.empty(9, 128)
    kernels.expert_ffn(x, gate, up, down, out, num_threads=2)
    expected = F.linear(F.silu(F.linear(x, gate.float())) * F.linear(x, up.float()), down.float())
    assert torch.allclose(out, expected, atol=1e-5)


BAD = {
    "x-dim": ("x", torch.zeros(3)),
    "x-dtype": ("x", torch.zeros(3, 16, dtype=torch.float16)),  # the weights are bfloat16
    "x-stride": ("x", torch.zeros(16, 3).T),
    "x-device": ("x", torch.zeros(3, 16, device="meta")),
    "gate-dtype": ("gate", torch.zeros(24, 16)),
    "gate-shape": ("gate", torch.zeros(24, 15).bfloat16()),
    "gate-stride": ("gate", torch.zeros(16, 24).bfloat16().T),
    "up-shape": ("up", torch.zeros(23, 16).bfloat16()),
    "up-dtype": ("up", torch.zeros(24, 16).half()),
    "down-shape": ("down", torch.zeros(24, 16).bfloat16()),
    "down-stride": ("down", torch.zeros(24, 16).bfloat16().T),
    "out-shape": ("out", torch.zeros(2, 16)),
    "out-dtype": ("out", torch.zeros(3, 16).double()),
    "out-expanded": ("out", torch.zeros(1, 16).expand(3, 16)),
    "row_weights-shape": ("row_weights", torch.zeros(4)),
    "row_weights-dtype": ("row_weights", torch.zeros(3).double()),
    "row_weights-stride": ("row_weights", torch.zeros(6)[::2]),
    "activation": ("activation", kernels.Gating(activation="relu")),
    "limit": ("limit", kernels.Gating(limit=float("nan"))),
    "gate_bias-shape": ("gate_bias", kernels.Gating(gate_bias=torch.zeros(16))),
    "up_bias-dtype": ("up_bias", kernels.Gating(up_bias=torch.zeros(24).double())),
    "down_bias-dim": ("down_bias", kernels.Gating(down_bias=torch.zeros(1, 16))),
    "num_threads": ("num_threads", 0),
    "method": ("method", "fast"),
    "method-type": ("method", []),
    "activation-type": ("activation", kernels.Gating(activation=[])),
    "gate-negated": ("gate", torch._neg_view(torch.zeros(24, 16).bfloat16())),
}


def arguments() -> dict:
    gate, up, down = (torch.zeros(shape).bfloat16() for shape in ((24, 16), (24, 16), (16, 24)))
    return {"x": torch.zeros(3, 16), "gate": gate, "up": up, "down": down, "out": torch.ones(3, 16)}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_named(name):
    field, value = BAD[name]
    target = "gating" if isinstance(value, kernels.Gating) else field
    with pytest.raises(ValueError, match=f"^{field}: "):
        kernels.expert_ffn(**{**arguments(), target: value})


@pytest.mark.parametrize("field", ["x", "gate", "up", "down", "row_weights"])
def test_overlap_is_refused(field):
    given = {**arguments(), "row_weights": torch.zeros(3)}
    memory = torch.zeros(4096, dtype=torch.uint8)
    for name in (field, "out"):
        memory_view = memory[: given[name].nbytes].view(given[name].dtype).view(given[name].shape)
        given[name] = memory_view
    with pytest.raises(ValueError, match=f"^out: overlaps {field}"):
        kernels.expert_ffn(**given)


def test_a_width_of_zero_gives_the_bias():
    out = torch.full((2, 8), 5.0)
    empty = torch.zeros(0, 8).bfloat16()
    gating = kernels.Gating(down_bias=torch.arange(8.0))
    kernels.expert_ffn(torch.ones(2, 8), empty, empty, empty.T, out, gating=gating)
    assert torch.equal(out, torch.arange(8.0).expand(2, 8))


def test_every_path_is_tested():
    """The `isa` fixture goes through `supported_isas`: it must miss nothing that the system says the processor has."""
    flags = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")).split()
    expected = {"portable"}
    if {"avx2", "fma"}.issubset(flags):
        expected.add("avx2")
        if {"avx512f", "avx512bw", "avx512vl", "avx512dq"}.issubset(flags):
            expected.add("avx512")
            if "avx512_bf16" in flags:
                expected.add("avx512bf16")
            if {"amx_tile", "amx_bf16"}.issubset(flags):  # the system grants its tiles to whoever asks
                expected.add("amx")
    assert set(native().supported_isas()) == expected


def test_the_fixture_chooses_the_path(isa):
    assert kernels.isa() == isa
