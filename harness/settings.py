"""Hold the whole configuration of a run in one frozen object; Hydra's dictionaries end here."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from harness.config import ConfigError, config, parse, require, require_name
from harness.hardware.profile import HardwareConfig, require_size_gb
from harness.model.config import ModelConfig
from harness.record.wandb_sink import WandbConfig
from harness.routing.build import parse_routing
from harness.routing.recording import RecordRouting
from harness.workload.config import DatasetConfig

if TYPE_CHECKING:
    from harness.engine.engine import Engine
    from harness.engine.strategy import Strategy


@config
class ExperimentInfo:
    """The name and description of an experiment, a group of runs that belong together."""

    name: str
    description: str

    def __post_init__(self) -> None:
        require_name(self.name)


@config
class Settings:
    """The settings of one run. `strategy`, `machine` and `routing` are parsed by the package and modules that they
    name."""

    strategy: dict[str, Any]
    machine: dict[str, Any]
    routing: dict[str, Any]
    model: ModelConfig
    dataset: DatasetConfig
    hardware: HardwareConfig
    experiment: ExperimentInfo
    wandb: WandbConfig
    kv_cache_gb: float
    kv_block_tokens: int
    stop_at_eos: bool
    seed: int
    repeats: int
    verify: Literal["off", "sample", "all"]
    verify_requests: int
    record_routing: RecordRouting
    record_hidden: bool
    record_hidden_mb: float
    exclusive: bool
    stop_after_decode_passes: int | None
    keep_spans: Literal["all", "totals"]
    trace_slices: int | None
    results_dir: str
    progress: bool

    def __post_init__(self) -> None:
        require_size_gb("kv_cache_gb", self.kv_cache_gb)
        require(self.kv_block_tokens >= 1, "kv_block_tokens", f"must be >= 1, got {self.kv_block_tokens}")
        require(self.seed >= 0, "seed", f"must be >= 0, got {self.seed}")
        require(1 <= self.repeats <= 1000, "repeats", f"must be 1 to 1000, got {self.repeats}")
        parse_routing(self.routing)
        require(bool(self.results_dir.strip()), "results_dir", "must name a folder, got an empty text")
        told = f"must be > 0 and at most 1000000, got {self.record_hidden_mb:g}"
        require(0 < self.record_hidden_mb <= 1e6, "record_hidden_mb", told)
        wanted = self.stop_after_decode_passes
        told = f"must be at least 1 or null, got {wanted}"
        require(wanted is None or wanted >= 1, "stop_after_decode_passes", told)
        told = "must be off where stop_after_decode_passes ends a run before its requests have"
        require(wanted is None or self.verify == "off", "verify", told)
        told = f"must be all on machine={self.machine.get('name')}: spans are only forgotten on machine=simulated"
        require(self.keep_spans == "all" or self.machine.get("name") == "simulated", "keep_spans", told)
        slices = self.trace_slices
        require(slices is None or slices >= 1, "trace_slices", f"must be at least 1 or null, got {slices}")
        require(self.verify_requests >= 1, "verify_requests", f"must be >= 1, got {self.verify_requests}")

    @property
    def strategy_name(self) -> str:
        """The name that the strategy's YAML gives it, else the last part of its package."""
        return str(self.strategy.get("name") or str(self.strategy.get("package")).rsplit(".", 1)[-1])


def parse_settings(values: Mapping[str, Any]) -> Settings:
    """Raises ConfigError naming the field."""
    return parse(Settings, values)


def repeats_of(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the configurations of `repeats` single runs, alike but for their seeds. Raises ConfigError naming the
    field."""
    settings = parse_settings(values)
    return [{**values, "repeats": 1, "seed": settings.seed + number} for number in range(settings.repeats)]


class LoadedStrategy(NamedTuple):
    """A strategy's package and its parsed settings."""

    package: ModuleType
    config: Any

    def build(self, engine: Engine) -> Strategy:
        """Plan the strategy on `engine`, where it takes the memory that it needs beside weights and KV cache."""
        built: Strategy = self.package.build(self.config, engine)
        return built


def load_strategy(values: Mapping[str, Any]) -> LoadedStrategy:
    """Import and check what the `strategy` group of the configuration, `values`, asks for. Raises ConfigError below
    `strategy`."""
    settings = dict(values)
    name, package = settings.pop("name", None), settings.pop("package", None)
    require(name is None or isinstance(name, str), "strategy.name", f"must be a text or null, got {name!r}")
    if package is None:
        raise ConfigError("strategy.package", "missing; name the Python package of the strategy")
    if not isinstance(package, str) or not all(part.isidentifier() for part in package.split(".")):
        raise ConfigError("strategy.package", f"must be the dotted name of a Python package, got {package!r}")
    try:
        module = import_module(package)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{package}.".startswith(f"{error.name}."):
            raise
        raise ConfigError("strategy.package", f"there is no package '{package}'") from error
    for name in ("Config", "build"):
        if not hasattr(module, name):
            raise ConfigError("strategy.package", f"'{package}' has no {name}")
    return LoadedStrategy(module, parse(module.Config, settings, "strategy"))


def require_tensors(settings: Settings, machine: str) -> None:
    """Raises ConfigError where a record is wanted that `machine`, which has no tensors, cannot give."""
    told = f"machine={machine} computes no model; choose a machine that does, such as emulated"
    require(not settings.record_hidden, "record_hidden", f"must be false: {told}")
    require(settings.record_routing != "weights", "record_routing", f"must be true or false: {told}")


def require_num_gpus(settings: Settings, strategy_config: Any) -> None:
    """Raises ConfigError where there are several GPUs and the strategy does not say how they share a model."""
    num_gpus = settings.hardware.num_gpus
    if num_gpus > 1 and getattr(strategy_config, "parallelism", None) is None:
        raise ConfigError(
            "hardware.num_gpus",
            f"must be 1 for strategy {settings.strategy_name}, which uses one GPU, got {num_gpus}",
        )
