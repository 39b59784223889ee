from __future__ import annotations

import pytest

from harness.machine.emulated import EmulatedMachine
from harness.machine.shuffled import ShuffledMachine
from tests.fake_device import FakeDevice, cuda_machine

CAPACITIES_BYTES = {"device": 1 << 24, "pinned": 1 << 24}


@pytest.fixture
def emulated():
    """Makes emulated machines and closes them."""
    machines = []

    def make(**settings) -> EmulatedMachine:
        machines.append(EmulatedMachine(**{"capacities_bytes": CAPACITIES_BYTES, "rates": {}} | settings))
        return machines[-1]

    yield make
    for machine in machines:
        machine.close()


@pytest.fixture
def device():
    """Make a device without pauses, held and let go by tests."""
    fake = FakeDevice(longest_pause_s=0.0)
    yield fake
    fake.close()


@pytest.fixture
def cuda(device):
    """Makes CUDA machines over `device` and closes them."""
    machines = []

    def make(**settings):
        machines.append(cuda_machine(CAPACITIES_BYTES, device=device, **{"poison": False} | settings))
        return machines[-1]

    yield make
    device.hold(False)
    for machine in machines:
        machine.close()


@pytest.fixture(params=["emulated", "shuffled", "cuda"])
def machine(request, emulated, cuda):
    """Give each machine in turn, for what must hold on every one."""
    if request.param == "shuffled":
        return ShuffledMachine(capacities_bytes=CAPACITIES_BYTES, seed=0, eager=0.5)
    return cuda() if request.param == "cuda" else emulated()
