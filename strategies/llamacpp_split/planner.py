"""Divide the device's memory as a user of llama.cpp does who tunes `--n-cpu-moe`.

KV cache and activations come first, then the experts of as many layers as there is room for.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import asdict, dataclass
from typing import Any

from harness.config import ConfigError
from harness.engine.activations import device_bytes_per_token
from harness.engine.engine import Engine
from harness.engine.limits import SLACK_BYTES
from strategies.common.kv_on_device import block_bytes, cache_bytes, device_too_small
from strategies.llamacpp_split.config import Config, DeviceWeights


@dataclass(frozen=True, kw_only=True)
class Policy:
    cpu_moe_layers: int  # layers, from the first, whose experts stay in host memory
    slots: int
    context_tokens: int  # of the KV cache
    kv_bytes: int
    max_tokens: int  # of a micro-batch
    copied_experts: int  # room on the device for so many copies of the host's experts

    def as_record(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class _Room:
    """The device's memory beside the weights that must be there, and what takes it."""

    nbytes: int
    token_bytes: int
    block_bytes: int  # with its place in a block table
    block_size: int
    micro_batch_tokens: int

    def max_tokens(self, longest_prompt: int, num_blocks: int) -> int:
        """Return the tokens that a micro-batch can have: no more than the cache, or than the longest prompt."""
        return max(longest_prompt, min(self.micro_batch_tokens, num_blocks * self.block_size))

    def taken_bytes(self, longest_prompt: int, num_blocks: int) -> int:
        """Return the bytes of activations and of a KV cache of so many blocks."""
        return self.max_tokens(longest_prompt, num_blocks) * self.token_bytes + num_blocks * self.block_bytes


def plan_split(config: Config, engine: Engine) -> Policy:
    """Choose the size of the KV cache, then how many layers leave their experts in host memory.

    The cache holds `context_tokens`, or the longest request in every slot, or as much as fits beside the weights that
    have to be on the device. Requests that do not fit even alone are not counted; the scheduler rejects them. Raises
    ConfigError where the smallest does not fit, and where `context_tokens` is given and does not.
    """
    weights, blocks = DeviceWeights(engine), engine.kv.allocator
    free_bytes = engine.machine.tiers["device"].free_bytes - SLACK_BYTES
    room = _Room(
        nbytes=free_bytes - _weight_bytes(config, weights, _most_cpu_layers(config, weights)),
        token_bytes=device_bytes_per_token(engine.spec, engine.machine.gpu_kernels),
        block_bytes=block_bytes(engine),
        block_size=blocks.block_size,
        micro_batch_tokens=config.micro_batch_tokens,
    )
    slots = max(1, min(config.slots, len(engine.sequences)))
    longest_prompt, num_blocks = _cache(config, engine, room, slots)
    cpu_layers = _most_cpu_layers(config, weights)
    if config.cpu_moe_layers is None:
        left_bytes = free_bytes - room.taken_bytes(longest_prompt, num_blocks)
        cpu_layers = _least_cpu_layers(config, weights, left_bytes) or 0
    return Policy(
        cpu_moe_layers=cpu_layers,
        slots=slots,
        context_tokens=num_blocks * blocks.block_size,
        kv_bytes=cache_bytes(engine, num_blocks),
        max_tokens=room.max_tokens(longest_prompt, num_blocks),
        copied_experts=0 if config.offload_min_tokens is None else weights.num_copies(cpu_layers),
    )


def _cache(config: Config, engine: Engine, room: _Room, slots: int) -> tuple[int, int]:
    """Return the longest prompt that can run, and the blocks of the KV cache. A request that does not fit beside those
    that need fewer blocks is left out."""
    blocks = engine.kv.allocator
    given = None if config.context_tokens is None else blocks.blocks_for(config.context_tokens)
    sizes = sorted({(blocks.blocks_for(s.max_tokens), s.prompt_len) for s in engine.sequences} or {(1, 1)})
    longest_prompt = longest_blocks = 0
    for num_blocks, prompt_len in sizes:
        prompt = max(longest_prompt, prompt_len)
        if room.taken_bytes(prompt, num_blocks) <= room.nbytes and (given is None or num_blocks <= given):
            longest_prompt, longest_blocks = prompt, num_blocks
    if not longest_prompt and (given is None or sizes[0][0] <= given):
        raise _nothing_fits(config, engine, min(room.taken_bytes(prompt, num) for num, prompt in sizes))
    wanted = slots * longest_blocks if given is None else given
    fitting = bisect_right(range(wanted + 1), room.nbytes, key=lambda num: room.taken_bytes(longest_prompt, num)) - 1
    if given is not None and fitting < given:
        most = fitting * blocks.block_size
        raise ConfigError("strategy.context_tokens", f"must be at most {most}, which fill the device, or null")
    return longest_prompt, fitting


def _most_cpu_layers(config: Config, weights: DeviceWeights) -> int:
    """Return how many layers leave their experts in host memory at the most."""
    given = config.cpu_moe_layers
    return weights.num_layers if given is None else min(given, weights.num_layers)


def _weight_bytes(config: Config, weights: DeviceWeights, cpu_layers: int) -> int:
    return sum(weights.bytes_with(cpu_layers, copies=config.offload_min_tokens is not None).values())


def _least_cpu_layers(config: Config, weights: DeviceWeights, left_bytes: int) -> int | None:
    layers = range(weights.num_layers + 1)
    return next((n for n in layers if _weight_bytes(config, weights, n) <= left_bytes), None)


def _nothing_fits(config: Config, engine: Engine, smallest_bytes: int) -> ConfigError:
    """Return an error for `cpu_moe_layers` where more of them make room for the smallest request, or else for the
    device."""
    weights, given = DeviceWeights(engine), config.cpu_moe_layers
    free_bytes = engine.machine.tiers["device"].free_bytes - SLACK_BYTES
    least = _least_cpu_layers(config, weights, free_bytes - smallest_bytes)
    if given is not None and least is not None:
        return ConfigError("strategy.cpu_moe_layers", f"must be at least {least} on this device, or null, got {given}")
    return device_too_small(engine, config.least_weight_bytes(engine), smallest_bytes)
