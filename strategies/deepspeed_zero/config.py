"""The settings of ZeRO-Inference."""

from __future__ import annotations

from typing import ClassVar

from harness.config import config, require
from harness.engine.strategy import require_packet_mb
from harness.memory.placed import ModelParts
from harness.memory.weights import layer_slots, part_slot


@config
class Config:
    """`batch_size` is each GPU's; null means as many sequences as its memory holds, each as long as the longest."""

    parallelism: ClassVar[str] = "data"

    packet_mb: float = 1.0
    batch_size: int | None = None
    prefetch: bool = True

    def __post_init__(self) -> None:
        require_packet_mb(self.packet_mb)
        require(self.batch_size is None or self.batch_size > 0, "batch_size", "must be > 0 or null")

    def least_weight_bytes(self, model: ModelParts) -> dict[str, int]:
        """Return the device memory that weights take, by name: two layers, or one part at a time."""
        return layer_slots(model, 2) if self.prefetch else part_slot(model)
