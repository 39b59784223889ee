"""Every kernel test that asks for `isa` runs once on each code path this processor has."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest
from eventually import unhurried_examples

unhurried_examples()

BUILT = importlib.util.find_spec("kernels._native") is not None
ISAS = importlib.import_module("kernels._native").supported_isas() if BUILT else ["portable"]


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    from kernels._extension import native

    native().set_isa(request.param)
    yield request.param
    native().set_isa("")
