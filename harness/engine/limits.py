"""What fits: the arithmetic planners share, written once."""

from __future__ import annotations

from harness.config import ConfigError
from harness.engine.activations import (
    TABLE_ENTRY_BYTES,
    device_bytes_per_token,
    host_bytes_per_token,
    host_expert_bytes,
)
from harness.engine.engine import Engine
from harness.memory.tiers import PINNED, RAM
from harness.memory.weights import PartSource, stored_bytes

SLACK_BYTES = 1 << 16  # alignment of many small buffers


def longest_sequence(engine: Engine) -> int:
    """Most tokens that one prefill can have: a preempted sequence is prefilled with what it generated."""
    return max((s.max_tokens for s in engine.sequences), default=1)


def least_bytes(
    source: PartSource, *, kv_cache_bytes: int, longest_tokens: int, weights_tier: str = PINNED
) -> dict[str, dict[str, int]]:
    """By tier and name, what every strategy needs at the least: the model in `weights_tier` and the KV cache in pinned
    memory; on the device the ends of the model, two layers, and one micro-batch that holds the longest sequence."""
    spec, family = source.spec, source.family
    layers = [sum(part.nbytes for part in family.layer_parts(spec, layer)) for layer in range(spec.num_layers)]
    tokens = f"one micro-batch of {longest_tokens} tokens"
    needed: dict[str, dict[str, int]] = {
        "device": {
            "two layers of weights": 2 * max(layers),
            "embedding and head": family.embedding_part(spec).nbytes + family.head_part(spec).nbytes,
            tokens: longest_tokens * device_bytes_per_token(spec),
        },
        weights_tier: {"weights": stored_bytes(source)},
    }
    pinned = {"kv cache": kv_cache_bytes, tokens: longest_tokens * host_bytes_per_token(spec)}
    needed[PINNED] = needed.get(PINNED, {}) | pinned
    return needed


def tokens_that_fit(
    engine: Engine,
    *,
    num_layers_buffered: int,
    num_micro_batches: int,
    reserved_bytes: int = 0,
    pinned_reserved_bytes: int = 0,
    host_experts: bool = False,
) -> int:
    """Tokens of activations per micro-batch that fit device memory beside the weight buffer and `reserved_bytes`, and
    pinned memory beside `pinned_reserved_bytes`, with rows for experts on the host where there are to be some; of
    several GPUs the first has the least room.

    Raises ConfigError naming the memory where not even one token fits.
    """
    device = engine.machine.tiers["device"]
    tables_bytes = num_micro_batches * engine.kv.num_device_blocks * TABLE_ENTRY_BYTES
    weights_bytes = num_layers_buffered * engine.store.layer_bytes + reserved_bytes + tables_bytes + SLACK_BYTES
    per_token_bytes = device_bytes_per_token(engine.spec) * num_micro_batches
    pinned = engine.machine.tiers["pinned"]
    fitting = (device.free_bytes - weights_bytes) // per_token_bytes
    if fitting < 1:
        needed_gb = (device.used_bytes + weights_bytes + per_token_bytes * longest_sequence(engine)) / 1e9
        raise ConfigError(
            "hardware.device_memory_gb",
            f"{device.capacity_bytes / 1e9:.4g} GB is too small: embedding and head, {num_layers_buffered} layer "
            f"buffers and the longest sequence need {needed_gb:.4g} GB",
        )
    per_host_token_bytes = host_bytes_per_token(engine.spec)
    per_host_token_bytes += sum(host_expert_bytes(engine.spec).values()) if host_experts else 0
    free_bytes = pinned.free_bytes - pinned_reserved_bytes
    host_fitting = free_bytes // (per_host_token_bytes * num_micro_batches * len(engine.ranks))
    if host_fitting < 1:
        staged = f", {pinned_reserved_bytes / 1e9:.4g} GB of buffers" if pinned_reserved_bytes else ""
        limit = pinned.limit
        raise ConfigError(
            f"hardware.{limit.name}_gb" if limit.name == RAM else f"hardware.{limit.name}_memory_gb",
            f"{limit.capacity_bytes / 1e9:.4g} GB hold weights, KV cache{staged}, and not one token beside them",
        )
    return min(fitting, host_fitting)
