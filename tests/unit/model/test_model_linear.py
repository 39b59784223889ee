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


def test_method_is_measured_once_and_can_be_forced(monkeypatch):
    monkeypatch.delenv(module.METHOD_VARIABLE, raising=False)
    calls = []
    monkeypatch.setattr(module, "_best_s", lambda multiply, x, w: calls.append(multiply) or float(multiply is F.linear))
    assert bf16_method() == "kernel" and bf16_method() == "kernel" and len(calls) == 2
    bf16_method.cache_clear()
    monkeypatch.setattr(module, "_best_s", lambda multiply, x, w: float(multiply is not F.linear))
    assert bf16_method() == "native"
    bf16_method.cache_clear()
    monkeypatch.setenv(module.METHOD_VARIABLE, "kernel")
    assert bf16_method() == "kernel"


def test_unknown_method_names_the_variable(monkeypatch):
    monkeypatch.setenv(module.METHOD_VARIABLE, "fast")
    with pytest.raises(ValueError, match="MOE_HARNESS_BF16_LINEAR: must be native or kernel"):
        bf16_method()
