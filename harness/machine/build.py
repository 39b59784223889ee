"""A machine by the name in its YAML: each is a module here with `Config` and `build(config, hardware, spec)`.

`Config.has_tensors` says whether models really run on the machine. A module whose runs would disturb each other names
with `resource()` what of this computer each wants for itself. A module with `choose(config)` in the place of `build`
stands for another one, whose configuration it gives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from harness.config import ConfigError, parse
from harness.hardware.profile import HardwareConfig
from harness.machine.base import Machine
from harness.machine.turn import Turn
from harness.model.spec import ModelSpec


@dataclass(frozen=True)
class LoadedMachine:
    """A loaded machine builds the machine that the configuration asks for. `values` is the `machine` group with the
    machine that will run, where the configuration leaves the choice to this computer. `has_tensors`: it runs models,
    it does not only time them."""

    values: dict[str, Any]
    has_tensors: bool
    build: Callable[[HardwareConfig, ModelSpec], Machine]
    resource: Callable[[], str] | None

    def turn(self, name: str, *, exclusive: bool) -> AbstractContextManager[Turn | None]:
        """Return the turn of a run which others know as `name`; None where runs cannot disturb each other."""
        return nullcontext() if self.resource is None else Turn(self.resource(), name, exclusive=exclusive)


def load_machine(values: Mapping[str, Any]) -> LoadedMachine:
    """Load the machine from the `machine` group of the configuration, which is checked at once."""
    chosen = dict(values)
    module, config = _parsed(chosen)
    if hasattr(module, "choose"):
        chosen = module.choose(config)
        module, config = _parsed(chosen)
    build, resource = partial(module.build, config), getattr(module, "resource", None)
    return LoadedMachine(chosen, module.Config.has_tensors, build, resource)


def _parsed(values: Mapping[str, Any]) -> tuple[ModuleType, Any]:
    settings = dict(values)
    name = str(settings.pop("name", ""))
    module_name = f"harness.machine.{name}"
    if not name.isidentifier() or find_spec(module_name) is None or not _is_machine(import_module(module_name)):
        raise ConfigError("machine.name", f"'{name}' is not a machine; valid are {', '.join(available())}")
    module = import_module(module_name)
    return module, parse(module.Config, settings, "machine")


def available() -> list[str]:
    """List the machines that exist."""
    names = [path.stem for path in Path(__file__).parent.glob("*.py")]
    return sorted(n for n in names if n != "build" and _is_machine(import_module(f"harness.machine.{n}")))


def _is_machine(module: ModuleType) -> bool:
    return hasattr(module, "build") or hasattr(module, "choose")
