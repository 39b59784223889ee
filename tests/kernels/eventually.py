"""Waiting for what another thread, process or device does by itself: no test may depend on how soon that is."""

from __future__ import annotations

import time
from collections.abc import Callable

GIVE_UP_S = 120.0  # below the 300 s that pytest gives a test; a machine that stands still for a while is no fault


def eventually(condition: Callable[[], object], meanwhile: Callable[[], object] = lambda: None) -> None:
    """Returns once `condition()` holds; what `meanwhile()` raises, a machine's failure say, ends the wait."""
    give_up_s = time.monotonic() + GIVE_UP_S
    while not condition():
        meanwhile()
        assert time.monotonic() < give_up_s, f"it did not come within {GIVE_UP_S:g} s"
        time.sleep(1e-3)
