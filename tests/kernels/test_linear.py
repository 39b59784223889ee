"""bfloat16 weights read in place: the exact product, on every instruction set, for every shape and stride."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kernels
from kernels._extension import native


@pytest.fixture(autouse=True)
def best_isa_again():
    yield
    native().set_isa("")


@settings(max_examples=60)
@given(
    rows=st.integers(0, 20),
    outputs=st.integers(1, 70),
    depth=st.integers(1, 150),
    x_dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    out_dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    threads=st.integers(1, 3),
    isa=st.sampled_from(native().supported_isas()),
)
def test_product_is_exact_up_to_float32_sums(rows, outputs, depth, x_dtype, out_dtype, threads, isa):
    native().set_isa(isa)
    x = torch.randn(rows, 2 * depth).to(x_dtype)[:, :depth]  # strided rows
    weight = torch.randn(outputs, depth + 3).bfloat16()[:, :depth]
    out = torch.full((rows, outputs + 2), 7.0, dtype=out_dtype)
    kernels.linear(x, weight, out[:, :outputs], num_threads=threads)
    exact = x.double() @ weight.double().T
    scale = x.double().abs() @ weight.double().abs().T
    rounding = exact.abs() * (2.0**-8 if out_dtype is torch.bfloat16 else 0.0)
    assert ((out[:, :outputs].double() - exact).abs() <= rounding + scale * 1e-6).all()
    assert (out[:, outputs:] == 7.0).all(), "wrote outside its output"


FEW_AND_MANY = [2, 16]  # rows: tiles are for many


@pytest.mark.parametrize("rows", FEW_AND_MANY)
def test_nan_and_infinity_pass_through(isa, rows):
    x = torch.ones(rows, 40)
    weight = torch.ones(5, 40).bfloat16()
    weight[1, 39], weight[2, 0] = float("nan"), float("inf")
    out = kernels.linear(x, weight)
    assert out[0].tolist()[0] == 40.0
    assert out[:, 1].isnan().all() and (out[:, 2] == float("inf")).all()


@pytest.mark.parametrize("rows", FEW_AND_MANY)
def test_float32_inputs_lose_no_bit(isa, rows):
    """An identity gives back each number, from 1e-20 to 1e38: also where products are of bfloat16 parts of it."""
    generator = torch.Generator().manual_seed(3)
    exponents = torch.rand(rows, 70, generator=generator) * 192 - 66
    x = torch.randn(rows, 70, generator=generator).clamp(-2, 2) * 2.0**exponents
    assert torch.equal(kernels.linear(x, torch.eye(70).bfloat16()), x)


def test_more_rows_than_a_slab(isa):
    x, weight = torch.randn(1061, 100), torch.randn(300, 100).bfloat16()
    out = kernels.linear(x, weight, num_threads=2)
    exact = x.double() @ weight.double().T
    assert ((out.double() - exact).abs() <= 1e-6 * (x.double().abs() @ weight.double().abs().T)).all()


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("weight", lambda x, w, o: (x, w.float(), o)),
        ("weight", lambda x, w, o: (x, w[:, :7], o)),
        ("x", lambda x, w, o: (x.double(), w, o)),
        ("x", lambda x, w, o: (x.T.contiguous().T, w, o)),
        ("out", lambda x, w, o: (x, w, o[:2])),
        ("out", lambda x, w, o: (x, w, w[: x.shape[0], : w.shape[0]])),
    ],
)
def test_bad_arguments_are_named(name, change):
    x, weight = torch.randn(4, 8), torch.randn(8, 8).bfloat16()
    x, weight, out = change(x, weight, torch.empty(4, 8))
    with pytest.raises(ValueError, match=f"^{name}: "):
        kernels.linear(x, weight, out)
