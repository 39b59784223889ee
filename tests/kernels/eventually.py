"""Waiting for what another thread, process or device does by itself: no test may depend on how soon that is."""

from __future__ import annotations

import time
from collections.abc import Callable

from hypothesis import HealthCheck, settings

GIVE_UP_S = 120.0  # below the 300 s that pytest gives a test; a machine that stands still for a while is no fault


def eventually(condition: Callable[[], object], meanwhile: Callable[[], object] = lambda: None) -> None:
    """Returns once `condition()` holds; what `meanwhile()` raises, a machine's failure say, ends the wait."""
    give_up_s = time.monotonic() + GIVE_UP_S
    while not condition():
        meanwhile()
        assert time.monotonic() < give_up_s, f"it did not come within {GIVE_UP_S:g} s"
        time.sleep(1e-3)


def unhurried_examples() -> None:
    """Let hypothesis take as long as it needs for an example; all else is as it chooses, in CI and elsewhere."""
    settings.register_profile(
        "unhurried", settings.default, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("unhurried")
