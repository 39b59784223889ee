import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.model import linear as module
from harness.model.linear import bf16_method, linear

BF16_EPS = 2.0**-8


@pytest.fixture(autouse=True)
def forget_method():
    bf16_method.cache_clear()
    yield
    bf16_method.cache_clear()


@settings(max_examples=25)
@given(
    m=st.integers(1, 40),
    n_in=st.integers(1, 90),
    n_out=st.integers(1, 300),
    method=st.sampled_from(["native", "kernel"]),
)
def test_bfloat16_is_the_exact_product_rounded_once(m, n_in, n_out, method):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(module.METHOD_VARIABLE, method)
        bf16_method.cache_clear()
        x, weight = torch.randn(m, n_in).bfloat16(), torch.randn(n_out, n_in).bfloat16()
        got = linear(x, weight)
    exact = x.double() @ weight.double().T
    assert got.dtype == torch.bfloat16 and got.shape == (m, n_out)
    scale = x.double().abs() @ weight.double().abs().T  # rounding of the sums is relative to this
    assert ((got.double() - exact).abs() <= exact.abs() * BF16_EPS + scale * 1e-6).all()


def test_float32_stays_float32():
    x, weight = torch.randn(20, 30), torch.randn(50, 30)
    torch.testing.assert_close(linear(x, weight), F.linear(x, weight), rtol=0, atol=0)


@pytest.mark.parametrize(("path", "expected"), [("avx512", "kernel"), ("amx", "kernel"), ("avx512bf16", "native")])
def test_the_code_path_decides_what_multiplies_unless_torch_is_asked_for(monkeypatch, path, expected):
    monkeypatch.delenv(module.METHOD_VARIABLE, raising=False)
    monkeypatch.setattr(module.kernels, "isa", lambda: path)
    monkeypatch.setattr(module.kernels, "linear", lambda x, weight: "kernel")
    monkeypatch.setattr(module.F, "linear", lambda x, weight: "native")
    x = torch.ones(2, 3).bfloat16()
    assert (linear(x, x), linear(x.float(), x.float())) == (expected, "native")
    bf16_method.cache_clear()
    monkeypatch.setenv(module.METHOD_VARIABLE, "native")
    assert linear(x, x) == "native"


def test_records_say_what_multiplies(monkeypatch):
    monkeypatch.setenv(module.METHOD_VARIABLE, "native")
    monkeypatch.setenv("KERNELS_GEMM_TOKENS", "40")
    told = module.cpu_products()
    assert told.endswith(
        "bfloat16 linear by native; experts by torch from 40 tokens on 1 thread, from 40 tokens on 2 threads"
    )
    monkeypatch.setenv("KERNELS_GEMM_TOKENS", "never")
    assert told.startswith(module.cpu_products())


def test_unknown_method_names_the_variable(monkeypatch):
    monkeypatch.setenv(module.METHOD_VARIABLE, "fast")
    with pytest.raises(ValueError, match="MOE_HARNESS_BF16_LINEAR: must be native or kernel"):
        bf16_method()
