"""Lead from settings to a strategy that is ready: a run, a plan and a calibration set up in the same steps.

settings, machine and strategy are checked (`Session.of`), before anything is loaded or waited for
-> model -> workload -> machine -> sequences -> engine -> strategy, each by a method of its own
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any

from harness.config import ConfigError, require
from harness.engine.assembly import assemble_engine, host_weight_bytes, rank_sources
from harness.engine.engine import Engine
from harness.engine.garbage import collecting_rarely
from harness.engine.limits import least_bytes, least_device_bytes, most_tokens
from harness.engine.sequences import Sequence
from harness.engine.strategy import (
    Strategy,
    cpu_attention_times,
    parallelism,
    pin_thread_gb_s,
    pin_threads,
    weights_tier,
)
from harness.machine.base import Machine
from harness.machine.build import LoadedMachine, load_machine
from harness.machine.simulated import SimulatedMachine
from harness.machine.virtual.world import World
from harness.memory.tiers import PAGEABLE, PINNED, enough, told_bytes
from harness.memory.weights import stored_bytes
from harness.model.config import RANDOM
from harness.model.loading import LoadedModel, load_model
from harness.model.spec import ModelSpec
from harness.routing.build import build_predictor, build_routing
from harness.settings import LoadedStrategy, Settings, load_strategy, parse_settings, require_num_gpus, require_tensors
from harness.workload.build import build_workload
from harness.workload.request import Workload

Calibrate = Callable[[SimulatedMachine, Settings, ModelSpec], None]  # gives a machine the costs measured here


@dataclass(eq=False)
class Session:
    """A set-up keeps what each of its steps has made, also for the records of a run that ends early.

    A field is None until its step is done. The steps come in the order of the methods; a calibration, which has no
    strategy, leaves some out. As a context manager the session closes the machine in the end.
    """

    settings: Settings
    loaded_machine: LoadedMachine
    loaded_strategy: LoadedStrategy | None = None
    model: LoadedModel | None = None
    workload: Workload | None = None
    machine: Machine | None = None
    sequences: list[Sequence] = field(default_factory=list)
    engine: Engine | None = None
    strategy: Strategy | None = None
    values: Mapping[str, Any] = field(default_factory=dict)  # the configuration; empty where there was none

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Session:
        """Begin with what the configuration `values` asks for. Raises ConfigError naming the field that is wrong."""
        settings = parse_settings(values)
        machine = load_machine(settings.machine)
        settings = replace(settings, machine=machine.values)
        strategy = load_strategy(settings.strategy)
        require_num_gpus(settings, strategy.config)
        if not machine.has_tensors:
            require_tensors(settings, str(machine.values["name"]))
        return cls(settings, machine, strategy, values=values)

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.machine is not None:
            self.machine.close()

    @property
    def has_tensors(self) -> bool:
        """True where the machine runs the model, False where it only times it."""
        return self.loaded_machine.has_tensors

    @property
    def strategy_config(self) -> Any:
        """The strategy's own settings; None without a strategy."""
        return self.loaded_strategy and self.loaded_strategy.config

    def load_model(self) -> LoadedModel:
        """Load the model, which also settles host memory that the hardware states relative to model and KV cache."""
        settings = self.settings
        if self.has_tensors and settings.model.path == RANDOM:
            message = f"must be off for model.path={RANDOM}: there is no checkpoint whose tokens to compare with"
            require(settings.verify == "off", "verify", message)
        self.model = load_model(settings.model, has_tensors=self.has_tensors, seed=settings.seed)
        config, spec = self.strategy_config, self.model.spec
        hardware = settings.hardware.staged_by(pin_threads(config), pin_thread_gb_s(config, spec))
        hardware = hardware.attending_by(cpu_attention_times(config, spec))
        needed_bytes = stored_bytes(self.model.source) + int(settings.kv_cache_gb * 1e9)
        self.settings = replace(settings, hardware=hardware.holding(needed_bytes))
        return self.model

    def load_workload(self) -> Workload:
        """Read or make the prompts, in the model's own tokens."""
        assert self.model is not None, "prompts are limited by the model"
        self.workload = build_workload(
            self.settings.dataset,
            self.model.tokenizer,
            vocab_size=self.model.spec.vocab_size,
            max_positions=self.model.spec.max_positions,
            seed=self.settings.seed,
        )
        return self.workload

    def build_machine(self, calibrate: Calibrate | None = None) -> Machine:
        """Start the machine. One without tensors gets the routing that it answers with and, where the hardware has no
        rates, its costs by `calibrate`, which may take minutes to measure them in a session of its own."""
        assert self.model is not None, "costs depend on the model"
        settings, spec = self.settings, self.model.spec
        self.machine = machine = self.loaded_machine.build(settings.hardware, spec)
        if isinstance(machine, SimulatedMachine):
            if settings.hardware.calibrated and settings.hardware.num_gpus > 1:
                several = "nothing was measured with several; use a profile with stated rates"
                raise ConfigError("hardware.num_gpus", f"must be 1 on a calibrated profile: {several}")
            routing = build_routing(settings.routing, spec, settings.seed)
            predictor = build_predictor(settings.routing, routing, spec, settings.seed)
            machine.world = World(routing, spec.num_experts, predictor)
            if settings.hardware.calibrated:
                assert calibrate is not None, "nobody measures the costs of a calibrated profile"
                calibrate(machine, settings, spec)
        return machine

    def queue_requests(self) -> list[Sequence]:
        """Make a sequence of every request of the workload."""
        assert self.workload is not None, "there are no requests"
        self.sequences = [Sequence(request) for request in self.workload.requests]
        return self.sequences

    def build_engine(self) -> Engine:
        """Put model, KV cache and sequences on the machine, the weights where the strategy wants them.

        Raises ConfigError naming the capacity that does not suffice.
        """
        assert self.model is not None and self.machine is not None, "an engine needs a model and a machine"
        settings, config, model = self.settings, self.strategy_config, self.model
        num_gpus, shared = settings.hardware.num_gpus, parallelism(config)
        if settings.stop_at_eos and model.checkpoint is None:
            raise ConfigError("stop_at_eos", "must be false without a checkpoint: nothing real is sampled there")
        if settings.stop_at_eos and model.spec.eos_token_id is None:
            raise ConfigError("stop_at_eos", "config.json names no end-of-sequence token, or several; set it to false")
        weights_bytes = host_weight_bytes(model.source, num_gpus, shared)
        _require_host_memory(self.machine, settings, weights_tier(config), weights_bytes)
        first = rank_sources(model.source, num_gpus, shared)[0]
        self._require_device_memory(least_device_bytes(config, first))
        self.engine = engine = assemble_engine(
            self.machine,
            model.source,
            num_gpus=num_gpus,
            kv_bytes=int(settings.kv_cache_gb * 1e9),
            block_size=settings.kv_block_tokens,
            weights_tier=weights_tier(config),
            parallelism=shared,
            sequences=self.sequences,
            eos_token_id=model.spec.eos_token_id if settings.stop_at_eos else None,
        )
        if engine.kv.allocator.num_blocks == 0:
            block_bytes = settings.kv_block_tokens * sum(each.spec.kv_bytes_per_token for each in engine.ranks)
            told = f"{settings.kv_cache_gb:g} holds no block; one takes {enough(block_bytes)} GB"
            raise ConfigError("kv_cache_gb", told)
        return engine

    def least_bytes(self) -> dict[str, dict[str, int]]:
        """Return the bytes, by tier and name, with which the model and each request of the workload can be held."""
        assert self.model is not None, "the model takes the most"
        settings, config, source = self.settings, self.strategy_config, self.model.source
        num_gpus, shared = settings.hardware.num_gpus, parallelism(config)
        requests = self.workload.requests if self.workload is not None else ()
        return least_bytes(
            config,
            rank_sources(source, num_gpus, shared)[0],
            weights_bytes=host_weight_bytes(source, num_gpus, shared),
            kv_cache_bytes=int(settings.kv_cache_gb * 1e9),
            longest_tokens=most_tokens(Sequence(request) for request in requests),
            num_gpus=num_gpus,
            kernels=None if self.machine is None else self.machine.gpu_kernels,
        )

    def _require_device_memory(self, least: Mapping[str, int]) -> None:
        """Raise ConfigError where the first GPU, which has the most to hold, cannot hold even the `least`: its weights.

        The error states what holds the longest request too: with less, a strategy may reject that request and run the
        others.
        """
        hardware = self.settings.hardware
        if sum(least.values()) > hardware.capacities_bytes["device"]:
            held = self.least_bytes()["device"]
            told = f"must hold {enough(sum(held.values()))} GB for this model ({told_bytes(held)})"
            raise ConfigError("hardware.device_memory_gb", f"{told}, got {hardware.device_memory_gb:g}")

    def build_strategy(self) -> Strategy:
        """Let the strategy plan on the engine and take its own memory there."""
        assert self.loaded_strategy is not None and self.engine is not None, "a strategy plans on an engine"
        with collecting_rarely():
            self.strategy = self.loaded_strategy.build(self.engine)
        return self.strategy


def _require_host_memory(machine: Machine, settings: Settings, weights_tier: str, weights_bytes: int) -> None:
    for tier in (PINNED, PAGEABLE):
        wanted = {"the weights": weights_bytes / 1e9} if tier == weights_tier else {}
        wanted |= {"kv_cache_gb": settings.kv_cache_gb} if tier == PINNED else {}
        if sum(wanted.values()) * 1e9 > machine.tiers[tier].capacity_bytes:
            held = " and ".join(f"{name} ({enough(round(size_gb * 1e9))} GB)" for name, size_gb in wanted.items())
            field = f"{tier}_memory_gb"
            raise ConfigError(f"hardware.{field}", f"must hold {held}, got {getattr(settings.hardware, field):g}")
