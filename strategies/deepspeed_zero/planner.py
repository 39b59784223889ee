"""Find how many sequences fit the device at once, with their KV cache and the activations of one prefill pass."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from harness.config import ConfigError
from harness.engine.activations import device_bytes_per_token
from harness.engine.engine import Engine
from harness.engine.limits import SLACK_BYTES
from strategies.common.kv_on_device import block_bytes, cache_bytes, device_too_small
from strategies.deepspeed_zero.config import Config


@dataclass(frozen=True, kw_only=True)
class Policy:
    batch_size: int  # sequences of one batch, of each GPU
    batch_size_limit: int  # what device memory would hold
    max_pass_tokens: int  # the prefill of a whole batch
    kv_bytes: int

    def as_record(self) -> dict[str, Any]:
        return asdict(self)


def plan_batch(config: Config, engine: Engine) -> Policy:
    """Choose the batch that fits the device when every sequence counts as much as the largest does.

    Batches are padded in the system that is modelled. Requests too large for that are not counted; the scheduler
    rejects those of them that do not fit. Raises ConfigError where not even the smallest fits, and where a given
    `batch_size` is too large.
    """
    blocks, device = engine.kv.allocator, engine.machine.tiers["device"]
    weights_bytes = config.least_weight_bytes(engine)
    room_bytes = device.free_bytes - sum(weights_bytes.values()) - SLACK_BYTES
    token_bytes = device_bytes_per_token(engine.spec, engine.machine.gpu_kernels)

    def needed_bytes(prompt_len: int, num_blocks: int) -> int:
        return prompt_len * token_bytes + num_blocks * block_bytes(engine)

    sizes = {(s.prompt_len, blocks.blocks_for(s.max_tokens)) for s in engine.sequences} or {(1, 1)}
    prompt_len = num_blocks = 0
    for size in sorted(sizes, key=lambda size: needed_bytes(*size)):
        if needed_bytes(max(prompt_len, size[0]), max(num_blocks, size[1])) > room_bytes:
            break
        prompt_len, num_blocks = max(prompt_len, size[0]), max(num_blocks, size[1])
    if not prompt_len:
        raise device_too_small(engine, weights_bytes, min(needed_bytes(*size) for size in sizes))
    limit = room_bytes // needed_bytes(prompt_len, num_blocks)
    batch_size = min(config.batch_size or limit, max(1, -(-len(engine.sequences) // len(engine.ranks))))
    if batch_size > limit:
        raise ConfigError("strategy.batch_size", f"must be at most {limit}, which fill the device, or null")
    return Policy(
        batch_size=batch_size,
        batch_size_limit=limit,
        max_pass_tokens=batch_size * prompt_len,
        kv_bytes=cache_bytes(engine, batch_size * num_blocks),
    )
