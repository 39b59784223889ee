"""Planners share this arithmetic of what fits into memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from harness.config import ConfigError
from harness.engine.activations import (
    TABLE_ENTRY_BYTES,
    device_bytes_per_token,
    host_bytes_per_token,
    host_expert_bytes,
    prediction_bytes,
)
from harness.engine.engine import Engine
from harness.engine.sequences import Sequence
from harness.engine.strategy import least_weight_bytes, weights_tier
from harness.machine.base import GpuKernels
from harness.memory.placed import ModelParts
from harness.memory.tiers import PINNED, RAM, Tier, enough, told_bytes
from harness.memory.weights import attention_parts, stored_bytes

SLACK_BYTES = 1 << 16  # for the alignment of many small buffers


def longest_sequence(engine: Engine) -> int:
    """Return the most tokens that one prefill can have: a preempted sequence is prefilled with what it generated."""
    return most_tokens(engine.sequences)


def most_tokens(sequences: Iterable[Sequence]) -> int:
    """Return the tokens of the longest sequence at its end; 1 where there is none."""
    return max((s.max_tokens for s in sequences), default=1)


def least_device_bytes(config: Any, model: ModelParts) -> dict[str, int]:
    """Return, by name, the weights that a GPU's memory must hold at the least under a strategy's `config`. `model` is
    the first GPU's part of the model: that GPU has the most to hold."""
    return {
        **least_weight_bytes(config, model),
        "embedding and head": stored_bytes(model, layers=False),
        "weights of attention itself": sum(part.nbytes for part in attention_parts(model) if part),
    }


def least_bytes(
    config: Any,
    model: ModelParts,
    *,
    weights_bytes: int,
    kv_cache_bytes: int,
    longest_tokens: int,
    num_gpus: int = 1,
    kernels: GpuKernels = None,
) -> dict[str, dict[str, int]]:
    """Return the bytes, by tier and name, that the harness asks for at the least under a strategy's `config`.

    All weights lie in the strategy's tier of host memory, and the KV cache in pinned memory. The device holds what
    `least_device_bytes` says of the first GPU's part of the `model`, and one micro-batch that has the longest sequence.
    `kernels` are the machine's.
    """
    tokens = f"one micro-batch of {longest_tokens} tokens"
    device = {**least_device_bytes(config, model), "alignment": SLACK_BYTES}
    device[tokens] = longest_tokens * device_bytes_per_token(model.spec, kernels)
    pinned = {"kv cache": kv_cache_bytes, tokens: num_gpus * longest_tokens * host_bytes_per_token(model.spec)}
    needed = {"device": device, PINNED: pinned}
    tier = weights_tier(config)
    return needed | {tier: {"weights": weights_bytes} | needed.get(tier, {})}


def tokens_that_fit(
    engine: Engine,
    *,
    num_layers_buffered: int,
    num_micro_batches: int,
    at_least: int = 1,
    reserved_bytes: Mapping[str, int] | None = None,
    pinned_reserved_bytes: int = 0,
    host_experts: bool = False,
    num_predicted: int = 0,
) -> int:
    """Return how many tokens of activations per micro-batch fit both device and pinned memory.

    Device memory also holds so many layers and what `reserved_bytes` names, and a token there has room for
    `num_predicted` predictions; pinned memory also holds `pinned_reserved_bytes`, and rows for experts on the host
    where `host_experts` is set. Of several GPUs the first has the least room.

    Raises ConfigError naming the memory where fewer than `at_least` fit.
    """
    device, pinned = engine.machine.tiers["device"], engine.machine.tiers["pinned"]
    beside = {
        f"{num_layers_buffered} layer buffers": num_layers_buffered * engine.store.layer_bytes,
        **(reserved_bytes or {}),
        "block tables": num_micro_batches * engine.kv.num_device_blocks * TABLE_ENTRY_BYTES,
        "alignment": SLACK_BYTES,
    }
    token_bytes = device_bytes_per_token(engine.spec, engine.machine.gpu_kernels)
    token_bytes += sum(prediction_bytes(num_predicted).values())
    token_bytes *= num_micro_batches
    fitting = (device.free_bytes - sum(beside.values())) // token_bytes
    needed = max(at_least, longest_sequence(engine))
    if fitting < at_least:
        raise _too_small(device, beside, token_bytes, fitting=fitting, at_least=at_least, needed=needed)
    host_token_bytes = host_bytes_per_token(engine.spec)
    host_token_bytes += sum(host_expert_bytes(engine.spec).values()) if host_experts else 0
    host_token_bytes *= num_micro_batches * len(engine.ranks)
    host_fitting = (pinned.free_bytes - pinned_reserved_bytes) // host_token_bytes
    if host_fitting < at_least:
        staging = {"staging buffers": pinned_reserved_bytes}
        raise _too_small(pinned, staging, host_token_bytes, fitting=host_fitting, at_least=at_least, needed=needed)
    return min(fitting, host_fitting)


def _too_small(
    tier: Tier, beside: Mapping[str, int], token_bytes: int, *, fitting: int, at_least: int, needed: int
) -> ConfigError:
    """Return an error that names everything that holds the memory or will hold it, and how much would be enough for the
    longest sequence."""
    limit = tier.limit
    held = {**limit.holders(), **beside}
    enough_gb = enough(sum(held.values()) + needed * token_bytes)
    return ConfigError(
        f"hardware.{limit.name}_gb" if limit.name == RAM else f"hardware.{limit.name}_memory_gb",
        f"{limit.capacity_bytes / 1e9:g} GB is too small: {told_bytes(held)} leave room for {max(fitting, 0)} tokens "
        f"of a micro-batch, {at_least} are needed; {enough_gb} GB hold the longest sequence ({needed} tokens) too",
    )
