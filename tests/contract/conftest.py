"""Let planners measure briefly where a contract test does not ask what they find."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from strategies.moelens import profiler
from strategies.offloading.planning import rate_probe


@pytest.fixture(scope="module")
def short_probes() -> Iterator[None]:
    """Let planners measure few tokens, once: tests/unit/strategies has tests of what they find."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profiler, "_PROBE_TOKENS", 16)
        patch.setattr(profiler, "_MAX_STEPS", 1)
        patch.setattr(rate_probe, "_REPEATS", 1)
        patch.setattr(rate_probe, "_MANY_TOKENS", 64)
        yield
