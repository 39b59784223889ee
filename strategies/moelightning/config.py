"""Settings of MoE-Lightning; each is an ablation switch."""

from __future__ import annotations

from dataclasses import field
from functools import partial
from typing import ClassVar

from harness.config import config, require
from harness.memory.tiers import PAGEABLE, PINNED
from strategies.common.policy import GivenPolicy


@config
class Config:
    parallelism: ClassVar[str] = "tensor"  # §4.3

    paging: bool = True  # §4.1; false: a layer's weights as one block
    staging: bool = True  # §A.1: pageable -> pinned -> device; false: the whole model lies in pinned memory
    padding: bool = False  # true: the paper's "(p)", prompts padded to the longest of their batch
    packet_mb: float = 1.0
    policy: GivenPolicy = field(default_factory=partial(GivenPolicy, gpu_ffn=True))  # Table 1; null: searched

    def __post_init__(self) -> None:
        require(self.packet_mb >= 1e-3, "packet_mb", f"must be at least 0.001, got {self.packet_mb:g}")

    @property
    def weights_tier(self) -> str:
        return PAGEABLE if self.staging else PINNED
