"""Count what a KV cache in device memory takes, and refuse a device without room for a single request. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping

from harness.config import ConfigError
from harness.engine.activations import TABLE_ENTRY_BYTES
from harness.engine.engine import Engine
from harness.engine.limits import SLACK_BYTES
from harness.memory.tiers import enough, told_bytes


def cache_bytes(engine: Engine, num_blocks: int) -> int:
    """Return the bytes of a GPU's KV cache of so many blocks."""
    return num_blocks * engine.kv.allocator.block_size * engine.spec.kv_bytes_per_token


def block_bytes(engine: Engine) -> int:
    """Return the device memory that a block takes: its place in the cache, and its entry in a block table."""
    return cache_bytes(engine, 1) + TABLE_ENTRY_BYTES


def device_too_small(
    engine: Engine, weights_bytes: Mapping[str, int], smallest_bytes: int, *, share: float = 1.0, share_name: str = ""
) -> ConfigError:
    """Return an error that names all that holds device memory or has to, and how much would be enough.

    The weights and the smallest request have to. No more than `share` of the device, the setting `share_name`, is used.
    """
    device = engine.machine.tiers["device"]
    held = {**device.holders(), **weights_bytes, "alignment": SLACK_BYTES, "the smallest request": smallest_bytes}
    used = f", since {share_name}={share:g} of it is used" if share_name else ""
    return ConfigError(
        "hardware.device_memory_gb",
        f"{device.capacity_bytes / 1e9:g} GB is too small: {enough(sum(held.values()) / share)} GB are needed{used} "
        f"({told_bytes(held)})",
    )
