"""What fits: the arithmetic planners share, written once."""

from __future__ import annotations

from harness.config import ConfigError
from harness.engine.activations import device_bytes_per_token
from harness.engine.engine import Engine

_SLACK_BYTES = 1 << 16  # alignment of many small buffers


def longest_sequence(engine: Engine) -> int:
    """Most tokens that one prefill can have: a preempted sequence is prefilled with what it generated."""
    return max((s.max_tokens for s in engine.sequences), default=1)


def tokens_that_fit(
    engine: Engine, *, num_layers_buffered: int, num_micro_batches: int, reserved_bytes: int = 0
) -> int:
    """Tokens of activations per micro-batch that fit device memory beside the weight buffer.

    Raises ConfigError("hardware.device_memory_gb", ...) where not even one token fits.
    """
    device = engine.machine.tiers["device"]
    weights_bytes = num_layers_buffered * engine.store.layer_bytes + reserved_bytes + _SLACK_BYTES
    per_token_bytes = device_bytes_per_token(engine.spec) * num_micro_batches
    fitting = (device.free_bytes - weights_bytes) // per_token_bytes
    if fitting < 1:
        needed_gb = (device.used_bytes + weights_bytes + per_token_bytes * longest_sequence(engine)) / 1e9
        raise ConfigError(
            "hardware.device_memory_gb",
            f"{device.capacity_bytes / 1e9:.4g} GB is too small: embedding and head, {num_layers_buffered} layer "
            f"buffers and the longest sequence need {needed_gb:.4g} GB",
        )
    return fitting
