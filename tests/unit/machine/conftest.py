from __future__ import annotations

import pytest

from harness.machine.emulated import EmulatedMachine
from harness.machine.shuffled import ShuffledMachine

CAPACITIES_BYTES = {"device": 1 << 24, "pinned": 1 << 24}


@pytest.fixture
def emulated():
    """Makes emulated machines and closes them; a hang ends after 20 s."""
    machines = []

    def make(**settings) -> EmulatedMachine:
        machines.append(
            EmulatedMachine(**{"capacities_bytes": CAPACITIES_BYTES, "rates": {}, "watchdog_s": 20.0} | settings)
        )
        return machines[-1]

    yield make
    for machine in machines:
        machine.close()


@pytest.fixture(params=["emulated", "shuffled"])
def machine(request, emulated):
    """What must hold on every machine."""
    if request.param == "shuffled":
        return ShuffledMachine(capacities_bytes=CAPACITIES_BYTES, seed=0, eager=0.5)
    return emulated()
