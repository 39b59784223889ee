"""What a machine without tensors is told before a run: the routing, and on `hardware=local` what was measured here."""

from __future__ import annotations

from harness.calibration.local import Log, calibrated_costs, local_table
from harness.config import ConfigError
from harness.machine.base import Machine
from harness.machine.simulated import SimulatedMachine
from harness.machine.simulation import World
from harness.model.spec import ModelSpec
from harness.routing.build import build_routing
from harness.settings import Settings


def equip(machine: Machine, settings: Settings, spec: ModelSpec, log: Log) -> None:
    """Give `machine` its world and, where the profile is calibrated, its costs; measured now if they never were."""
    assert isinstance(machine, SimulatedMachine), f"{machine.name} has tensors"
    if settings.hardware.calibrated and settings.hardware.num_gpus > 1:
        message = (
            "must be 1 on a calibrated profile: nothing was measured with several; use a profile with stated rates"
        )
        raise ConfigError("hardware.num_gpus", message)
    machine.world = World(build_routing(settings.routing, spec, settings.seed), spec.num_experts)
    if settings.hardware.calibrated:
        table = local_table(settings, spec, log)
        costs = calibrated_costs(table, settings.hardware, machine.is_busy)
        machine.calibrate(costs, table.slowdowns(), table.host)
