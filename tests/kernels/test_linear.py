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
    w_dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    x_is_narrow=st.booleans(),
    out_is_narrow=st.booleans(),
    threads=st.integers(1, 3),
    isa=st.sampled_from(native().supported_isas()),
)
def test_product_is_exact_up_to_float32_sums(rows, outputs, depth, w_dtype, x_is_narrow, out_is_narrow, threads, isa):
    native().set_isa(isa)
    x_dtype, out_dtype = (w_dtype if is_narrow else torch.float32 for is_narrow in (x_is_narrow, out_is_narrow))
    x = torch.randn(rows, 2 * depth).to(x_dtype)[:, :depth]  # strided rows
    weight = torch.randn(outputs, depth + 3).to(w_dtype)[:, :depth]
    out = torch.full((rows, outputs + 2), 7.0, dtype=out_dtype)
    kernels.linear(x, weight, out[:, :outputs], num_threads=threads)
    exact = x.double() @ weight.double().T
    scale = x.double().abs() @ weight.double().abs().T
    unit = 2.0**-8 if w_dtype is torch.bfloat16 else 2.0**-11
    rounding = exact.abs() * unit + 2.0**-25 if out_is_narrow else 0.0  # 2^-25: half of float16's smallest number
    assert ((out[:, :outputs].double() - exact).abs() <= rounding + scale * 1e-6).all()
    assert (out[:, outputs:] == 7.0).all(), "wrote outside its output"


FEW_AND_MANY = [2, 5, 7, 16, 33]  # rows, which tiles hold in different ways


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


@pytest.mark.parametrize("rows", [1, 2, 3, 6, 7, 8, 9, 17, 67])
@pytest.mark.parametrize(
    ("x_dtype", "w_dtype"),
    [(torch.bfloat16, torch.bfloat16), (torch.float32, torch.bfloat16), (torch.float16, torch.float16)],
)
def test_rows_deeper_than_a_chunk(isa, rows, x_dtype, w_dtype):
    """Chunks are up to 4096 deep and shallower for some numbers of rows; outputs fill no register tile."""
    generator = torch.Generator().manual_seed(rows)
    for depth in (1030, 8500):
        x = torch.randn(rows, depth, generator=generator).to(x_dtype)
        weight = torch.randn(37, depth, generator=generator).to(w_dtype)
        out = kernels.linear(x, weight, torch.empty(rows, 37), num_threads=2)
        size = x.double().abs() @ weight.double().abs().T
        assert ((out.double() - x.double() @ weight.double().T).abs() <= 1e-6 * size).all()


def test_more_rows_than_a_slab(isa):
    x, weight = torch.randn(1061, 100), torch.randn(300, 100).bfloat16()
    out = kernels.linear(x, weight, num_threads=2)
    exact = x.double() @ weight.double().T
    assert ((out.double() - exact).abs() <= 1e-6 * (x.double().abs() @ weight.double().abs().T)).all()


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("weight", lambda x, w, o: (x, w.float(), o)),
        ("x", lambda x, w, o: (x.half(), w, o)),
        ("out", lambda x, w, o: (x, w, o.half())),
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
