"""The settings of ZeRO-Inference."""

from __future__ import annotations

from typing import ClassVar

from harness.config import config, require


@config
class Config:
    """`batch_size` is each GPU's; null means as many sequences as its memory holds, each as long as the longest."""

    parallelism: ClassVar[str] = "data"

    packet_mb: float = 1.0
    batch_size: int | None = None
    prefetch: bool = True

    def __post_init__(self) -> None:
        require(self.packet_mb >= 1e-3, "packet_mb", f"must be at least 0.001, got {self.packet_mb:g}")
        require(self.batch_size is None or self.batch_size > 0, "batch_size", "must be > 0 or null")
