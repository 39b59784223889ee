"""A machine by the name in its YAML: each is a module of this package with `Config` and `build(config, hardware)`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from harness.config import ConfigError, parse
from harness.hardware.profile import HardwareConfig
from harness.machine.base import Machine


def load_machine(values: Mapping[str, Any]) -> Callable[[HardwareConfig], Machine]:
    """What builds the machine that the `machine` group of the configuration asks for; the group is checked at once."""
    settings = dict(values)
    name = str(settings.pop("name", ""))
    module_name = f"harness.machine.{name}"
    if not name.isidentifier() or find_spec(module_name) is None or not hasattr(import_module(module_name), "build"):
        raise ConfigError("machine.name", f"'{name}' is not a machine; valid are {', '.join(available())}")
    module = import_module(module_name)
    return partial(module.build, parse(module.Config, settings, "machine"))


def available() -> list[str]:
    """Machines that exist."""
    names = [path.stem for path in Path(__file__).parent.glob("*.py")]
    return sorted(n for n in names if n != "build" and hasattr(import_module(f"harness.machine.{n}"), "build"))
