"""Run the same tests on a GPU where there is one, and everywhere else in Triton's interpreter."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec

import pytest
import torch

ON_GPU = torch.cuda.is_available()
INSTALLED = find_spec("triton") is not None


def _import_interpreted() -> None:
    """Import Triton interpreted: it decides at import whether its own functions and ours are; nothing else is to
    notice."""
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        import triton

        triton.knobs.runtime.interpret = True
        import kernels.triton.warming  # noqa: F401  every kernel
    finally:
        del os.environ["TRITON_INTERPRET"]


if INSTALLED and not ON_GPU and "triton" not in sys.modules:
    _import_interpreted()


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Return the device on which the kernels run."""
    if not INSTALLED:
        pytest.skip("Triton is not installed (extra `test`, on Linux only)")
    from kernels.triton.device import INTERPRETED

    if not ON_GPU and not INTERPRETED:
        pytest.skip("Triton was imported before these tests could ask for its interpreter")
    return torch.device("cuda" if ON_GPU else "cpu")
