"""FlexGen(c) (schedule S3 of MoE-Lightning's Figure 6): attention on the CPU, which the GPU waits for."""

from __future__ import annotations

from dataclasses import field
from functools import partial
from typing import ClassVar

from harness.config import config, require
from harness.engine.engine import Engine
from harness.engine.strategy import Strategy
from harness.memory.tiers import PAGEABLE, PINNED
from strategies.common.offloading import build_offloading, complete_policy
from strategies.common.policy import GivenPolicy
from strategies.flexgen_c.schedule import waiting_for_cpu_attention


@config
class Config:
    parallelism: ClassVar[str] = "tensor"

    staging: bool = False  # true: pageable -> pinned -> device; false: the whole model lies in pinned memory
    padding: bool = False  # true: prompts are padded to the longest of their batch
    packet_mb: float = 1.0
    policy: GivenPolicy = field(default_factory=partial(GivenPolicy, gpu_ffn=True, resident_kv=0.0))  # null: searched

    def __post_init__(self) -> None:
        require(self.packet_mb >= 1e-3, "packet_mb", f"must be at least 0.001, got {self.packet_mb:g}")
        valid = self.policy.gpu_attention is not True
        require(valid, "policy.gpu_attention", "must be false or null: flexgen is the one with attention on the GPU")

    @property
    def weights_tier(self) -> str:
        return PAGEABLE if self.staging else PINNED


def build(config: Config, engine: Engine) -> Strategy:
    planned = complete_policy(
        config.policy,
        engine,
        packet_mb=config.packet_mb,
        padded=config.padding,
        gpu_attention=False,
        overlap="nothing",
    )
    return build_offloading(engine, planned, waiting_for_cpu_attention, paging=False, packet_mb=config.packet_mb)
