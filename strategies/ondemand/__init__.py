"""The floor and the correctness oracle loads a part, computes it and drops it; nothing overlaps with anything."""

from __future__ import annotations

from typing import ClassVar

from harness.config import config, require
from harness.engine.engine import Engine
from harness.engine.limits import longest_sequence, tokens_that_fit
from harness.engine.strategy import Strategy, require_packet_mb
from harness.memory.placed import ModelParts
from harness.memory.weights import layer_slots, part_slot
from strategies.common.sequential import SequentialPipeline
from strategies.common.static_batches import StaticBatches


@config
class Config:
    """`max_pass_tokens` null is as many tokens as device memory allows with the weights, but at most 4096, or as many
    as the longest sequence has. With `prefetch` this is the simplest pipeline that overlaps: the next layer's weights
    come while one layer computes."""

    parallelism: ClassVar[str] = "tensor"

    packet_mb: float = 1.0
    prefetch: bool = False
    max_pass_tokens: int | None = None

    def __post_init__(self) -> None:
        require_packet_mb(self.packet_mb)
        require(self.max_pass_tokens is None or self.max_pass_tokens > 0, "max_pass_tokens", "must be > 0 or null")

    def least_weight_bytes(self, model: ModelParts) -> dict[str, int]:
        """Return the device memory that weights take, by name: two layers, or one part at a time."""
        return layer_slots(model, 2) if self.prefetch else part_slot(model)


def build(config: Config, engine: Engine) -> Strategy:
    weights_bytes = config.least_weight_bytes(engine)
    fitting = tokens_that_fit(engine, num_layers_buffered=0, num_micro_batches=1, reserved_bytes=weights_bytes)
    wanted = config.max_pass_tokens or max(longest_sequence(engine), 4096)
    max_tokens = min(wanted, fitting)
    return Strategy(
        scheduler=StaticBatches(engine.sequences, engine.kv.allocator, max_pass_tokens=max_tokens),
        pipeline=SequentialPipeline(
            engine, max_tokens=max_tokens, packet_bytes=int(config.packet_mb * 1e6), prefetch=config.prefetch
        ),
        plan={"max_pass_tokens": max_tokens},
    )
