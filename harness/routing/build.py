"""Build a routing by the name in its YAML.

Each is a module of `kinds` with `Config` and `build(config, model, seed)`.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from harness.config import ConfigError, parse
from harness.routing.base import Predictor, RoutedModel, Routing
from harness.routing.predictors import StatedPredictor, StatedRates


def parse_routing(values: Mapping[str, Any]) -> tuple[ModuleType, Any]:
    """Return the kind's module and its settings; `values` is the `routing` group. Raises ConfigError below
    "routing"."""
    settings = dict(values)
    name = str(settings.pop("name", ""))
    module_name = f"harness.routing.kinds.{name}"
    if not name.isidentifier() or find_spec(module_name) is None:
        raise ConfigError("routing.name", f"'{name}' is no kind of routing; valid are {', '.join(available())}")
    module = import_module(module_name)
    return module, parse(module.Config, settings, "routing")


def build_routing(values: Mapping[str, Any], model: RoutedModel, seed: int) -> Routing:
    """Build the routing that the `routing` group of the configuration asks for. Raises ConfigError below "routing",
    also for files that cannot be read or are of another model."""
    module, settings = parse_routing(values)
    try:
        routing: Routing = module.build(settings, model, seed)
        return routing
    except ConfigError as error:
        raise error.below("routing") from None


def build_predictor(values: Mapping[str, Any], routing: Routing, model: RoutedModel, seed: int) -> Predictor | None:
    """Return the predictor that the `routing` group states, else the predictions that were recorded with the routing,
    if there are any. Raises ConfigError below "routing"."""
    settings = parse_routing(values)[1]
    try:
        if settings.hit_rates_path is not None:
            stated = StatedRates.read(Path(settings.hit_rates_path), model)
        elif settings.hit_rates is not None:
            stated = StatedRates.alike(settings.hit_rates, model)
        else:
            return routing.predictions
        return StatedPredictor(routing, stated, model, seed)
    except ConfigError as error:
        raise error.below("routing") from None


def available() -> list[str]:
    return sorted(path.stem for path in (Path(__file__).parent / "kinds").glob("*.py") if path.stem != "__init__")
