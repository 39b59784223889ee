"""The machine that suits this computer: cuda where torch finds a GPU, else emulated."""

from __future__ import annotations

from typing import Any, ClassVar

from harness.config import config
from harness.machine.base import require_watchdog_s
from harness.machine.cuda import device_found


@config
class Config:
    """Settings under `machine` in the configuration: those that both machines have."""

    has_tensors: ClassVar[bool] = True

    watchdog_s: float = 120.0
    poison: bool = False

    def __post_init__(self) -> None:
        require_watchdog_s(self.watchdog_s)


def choose(config: Config) -> dict[str, Any]:
    """Return the `machine` group of the configuration of the machine to take."""
    name = "cuda" if device_found() else "emulated"
    return {"name": name, "watchdog_s": config.watchdog_s, "poison": config.poison}
