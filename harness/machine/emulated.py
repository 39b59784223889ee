"""Emulate a machine with a worker thread a lane and a separate device arena; links and cpu lane are held to stated
rates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch

from harness.config import config, require
from harness.hardware.profile import HardwareConfig
from harness.machine.base import Lane, LaneKind, require_watchdog_s
from harness.machine.queues import Board
from harness.machine.threads.arenas import Arenas
from harness.machine.threads.context import HostContext, LaneRate
from harness.machine.threads.machine import ThreadedMachine
from harness.model.spec import ModelSpec


class EmulatedMachine(ThreadedMachine):
    """Every lane is a host thread; only the speed ratios are chosen."""

    label: ClassVar[str] = "emulated"
    name: ClassVar[str] = "emulated"
    warms_up: ClassVar[bool] = True

    def __init__(
        self,
        *,
        capacities_bytes: dict[str, int],
        rates: Mapping[LaneKind, LaneRate],
        poison: bool = False,
        watchdog_s: float = 120.0,
    ) -> None:
        torch.set_num_threads(1)  # one core a lane; must precede the workers
        arenas = Arenas(poison, at_hand=True)
        super().__init__(arenas=arenas, capacities_bytes=capacities_bytes, board=Board(), watchdog_s=watchdog_s)
        self._rates = dict(rates)

    def _host_context(self, lane: Lane) -> HostContext:
        return HostContext(lane, self._arenas, self._rates.get(lane.kind))


@config
class Config:
    """The configuration's group `machine` has these settings where it is `emulated`."""

    has_tensors: ClassVar[bool] = True

    watchdog_s: float = 120.0
    poison: bool = False

    def __post_init__(self) -> None:
        require_watchdog_s(self.watchdog_s)


def resource() -> str:
    """Name what each run wants all of: the cores, whatever links and GPU are played on them."""
    return "emulated"


def build(config: Config, hardware: HardwareConfig, spec: ModelSpec) -> EmulatedMachine:
    """Build the emulated machine with the profile's capacities and rates; profiles of real GPUs are for planning."""
    real = f"'{hardware.name}' is a real machine, which cannot be emulated; use hardware=laptop or a profile like it"
    require(hardware.gpu is None, "hardware", real)

    def rate(gflop_s: float | None, gb_s: float | None, link_gb_s: float | None = None) -> LaneRate:
        return LaneRate(gflop_s and gflop_s * 1e9, gb_s and gb_s * 1e9, link_gb_s and link_gb_s * 1e9)

    return EmulatedMachine(
        capacities_bytes=hardware.capacities_bytes,
        rates={
            LaneKind.GPU: rate(hardware.gpu_gflop_s, None, hardware.p2p_gb_s),
            LaneKind.CPU: rate(hardware.cpu_gflop_s, hardware.cpu_gb_s),
            LaneKind.H2D: rate(None, hardware.h2d_gb_s),
            LaneKind.D2H: rate(None, hardware.d2h_gb_s),
            LaneKind.PIN: rate(None, hardware.staging_gb_s),
        },
        poison=config.poison,
        watchdog_s=config.watchdog_s,
    )
