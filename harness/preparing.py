"""From settings to an engine: the model, the workload, and memory for both, checked before anything runs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from harness.config import ConfigError, require
from harness.engine.assembly import assemble_engine, host_weight_bytes, rank_sources
from harness.engine.engine import Engine
from harness.engine.limits import two_layers
from harness.engine.sequences import Sequence
from harness.engine.strategy import parallelism, weights_tier, whole_layers
from harness.machine.base import Machine
from harness.memory.tiers import PAGEABLE, PINNED, told_bytes
from harness.memory.weights import PartSource, ShardedSource, least_weight_bytes, stored_bytes
from harness.model.checkpoint import Checkpoint
from harness.model.config import RANDOM, ModelConfig
from harness.model.linear import bf16_method
from harness.model.planned import planned_model
from harness.model.spec import ModelSpec
from harness.model.zoo import ensure
from harness.settings import Settings
from harness.workload.build import build_workload
from harness.workload.request import Workload


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A checkpoint, or for a machine without tensors the dimensions of one."""

    source: ShardedSource
    weights_source: str  # for the records
    tokenizer: Any = None
    checkpoint: Checkpoint | None = None

    @property
    def spec(self) -> ModelSpec:
        return self.source.spec


def load_model(settings: Settings, *, has_tensors: bool) -> LoadedModel:
    """Raises ConfigError below `model` where the machine needs what the configuration does not give."""
    if not has_tensors:
        planned = planned_model(settings.model)
        stored = f"{planned.spec.weights.name} weights, else " if planned.spec.weights else ""
        return LoadedModel(source=planned, weights_source=f"dimensions only, {stored}{planned.spec.dtype}")
    settings.model.require_weights()
    if settings.model.path == RANDOM:
        return _random_model(settings)
    checkpoint = _checkpoint(settings.model)
    if checkpoint.spec.dtype == "bfloat16":
        bf16_method()  # decides by a measurement, which lanes at work would disturb
    kind = "random weights" if settings.model.path is None else f"checkpoint {settings.model.path}"
    return LoadedModel(
        source=checkpoint,
        weights_source=f"{kind}, {checkpoint.spec.dtype}, fingerprint {checkpoint.fingerprint()}",
        tokenizer=checkpoint.tokenizer(),
        checkpoint=checkpoint,
    )


def _checkpoint(model: ModelConfig) -> Checkpoint:
    folder = ensure(model)
    try:
        return Checkpoint(folder, model.dtype)
    except ConfigError as error:
        if model.path is not None:
            raise
        raise ConfigError(error.field, f"{error.message}; remove {folder}, and it is made again") from error


def _random_model(settings: Settings) -> LoadedModel:
    from harness.model.random_weights import RandomWeights

    message = f"must be off for model.path={RANDOM}: there is no checkpoint whose tokens to compare with"
    require(settings.verify == "off", "verify", message)
    source = RandomWeights(settings.model, seed=settings.seed)
    return LoadedModel(source=source, weights_source=f"random weights made in memory, {source.spec.dtype}")


def with_host_memory(settings: Settings, model: LoadedModel) -> Settings:
    """The settings, with host memory in gigabytes where the hardware states it relative to model and KV cache."""
    needed_bytes = stored_bytes(model.source) + int(settings.kv_cache_gb * 1e9)
    return replace(settings, hardware=settings.hardware.holding(needed_bytes))


def load_workload(settings: Settings, model: LoadedModel) -> Workload:
    return build_workload(
        settings.dataset,
        model.tokenizer,
        vocab_size=model.spec.vocab_size,
        max_positions=model.spec.max_positions,
        seed=settings.seed,
    )


def build_engine(
    settings: Settings,
    machine: Machine,
    model: LoadedModel,
    sequences: list[Sequence],
    strategy_config: Any = None,
) -> Engine:
    """Model, KV cache and sequences on the machine, the weights where the strategy wants them.

    Raises ConfigError naming the capacity that does not suffice.
    """
    spec, tier, shared = model.spec, weights_tier(strategy_config), parallelism(strategy_config)
    if settings.stop_at_eos and model.checkpoint is None:
        raise ConfigError("stop_at_eos", "must be false without a checkpoint: nothing real is sampled there")
    if settings.stop_at_eos and spec.eos_token_id is None:
        raise ConfigError("stop_at_eos", "this model's config.json names no end-of-sequence token; set it to false")
    weights_bytes = host_weight_bytes(model.source, settings.hardware.num_gpus, shared)
    _require_host_memory(machine, settings, tier, weights_bytes)
    first = rank_sources(model.source, settings.hardware.num_gpus, shared)[0]
    _require_device_memory(first, settings, whole_layers(strategy_config))
    engine = assemble_engine(
        machine,
        model.source,
        num_gpus=settings.hardware.num_gpus,
        kv_bytes=int(settings.kv_cache_gb * 1e9),
        block_size=settings.kv_block_tokens,
        weights_tier=tier,
        parallelism=shared,
        sequences=sequences,
        eos_token_id=spec.eos_token_id if settings.stop_at_eos else None,
    )
    if engine.kv.allocator.num_blocks == 0:
        block_gb = settings.kv_block_tokens * sum(each.spec.kv_bytes_per_token for each in engine.ranks) / 1e9
        raise ConfigError("kv_cache_gb", f"{settings.kv_cache_gb:g} holds no block; one takes {block_gb:.4g} GB")
    return engine


def _require_host_memory(machine: Machine, settings: Settings, weights_tier: str, weights_bytes: int) -> None:
    for tier in (PINNED, PAGEABLE):
        wanted = {"the weights": weights_bytes / 1e9} if tier == weights_tier else {}
        wanted |= {"kv_cache_gb": settings.kv_cache_gb} if tier == PINNED else {}
        if sum(wanted.values()) * 1e9 > machine.tiers[tier].capacity_bytes:
            held = " and ".join(f"{name} ({size_gb:.4g} GB)" for name, size_gb in wanted.items())
            field = f"{tier}_memory_gb"
            raise ConfigError(f"hardware.{field}", f"must hold {held}, got {getattr(settings.hardware, field):g}")


def _require_device_memory(first: PartSource, settings: Settings, whole_layers: bool) -> None:
    """Raise ConfigError where the first GPU, which has the most to hold, cannot hold what its strategy needs."""
    held = {
        two_layers(whole_layers): least_weight_bytes(first, whole_layers=whole_layers),
        "embedding and head": stored_bytes(first, layers=False),
    }
    needed_gb = sum(held.values()) / 1e9
    if needed_gb > settings.hardware.device_memory_gb:
        raise ConfigError(
            "hardware.device_memory_gb",
            f"must hold {needed_gb:.4g} GB for this model ({told_bytes(held)}), "
            f"got {settings.hardware.device_memory_gb:g}",
        )
