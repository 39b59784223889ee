"""Every kernel test that asks for `isa` runs once on each code path this processor has."""

from __future__ import annotations

import gc
import importlib.util
from collections.abc import Iterator

import pytest
from eventually import unhurried_examples
from fake_cuda import FakeCuda

unhurried_examples()

BUILT = importlib.util.find_spec("kernels._native") is not None
ISAS = importlib.import_module("kernels._native").supported_isas() if BUILT else ["portable"]


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    from kernels._extension import native

    native().set_isa(request.param)
    yield request.param
    native().set_isa("")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    """A CUDA runtime that tests steer, to which all memory is pinned; what movers take from it must be given back."""
    monkeypatch.setattr("kernels._mover_arguments.is_pinned", lambda tensor: True)
    fake = FakeCuda()
    yield fake
    fake.hold(False)
    gc.collect()
    assert fake.num_live == 0, "a stream, event or pinned block was left"
