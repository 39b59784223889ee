"""FastDecode with offloaded weights is schedule S2 of MoE-Lightning's Figure 6: CPU attention overlaps, without
pages."""

from __future__ import annotations

from typing import ClassVar

from harness.config import config
from harness.engine.engine import Engine
from harness.engine.strategy import Strategy
from strategies.fastdecode.schedule import overlapping_cpu_attention
from strategies.offloading.config import CpuAttentionConfig
from strategies.offloading.system import build_offloading, complete_policy


@config
class Config(CpuAttentionConfig):
    parallelism: ClassVar[str] = "tensor"


def build(config: Config, engine: Engine) -> Strategy:
    planned = complete_policy(
        config,
        engine,
        gpu_attention=False,
        overlap="weights apart",
    )
    return build_offloading(engine, planned, overlapping_cpu_attention, config, paging=False)
