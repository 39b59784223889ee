"""Load the compiled half of the package on first use."""

from __future__ import annotations

import functools
import importlib
from types import ModuleType


@functools.cache
def native() -> ModuleType:
    """Return the extension `kernels._native`. Raises `ImportError` with one line that says how to build it."""
    try:
        return importlib.import_module("kernels._native")
    except ImportError as error:
        raise ImportError(
            f"kernels: the C++ extension is not built for this Python ({error}); "
            "build it in the repository's root with `pip install -e .`"
        ) from error
