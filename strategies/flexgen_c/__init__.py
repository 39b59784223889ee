"""FlexGen(c) is schedule S3 of MoE-Lightning's Figure 6: attention is on the CPU, and the GPU waits for it."""

from __future__ import annotations

from typing import ClassVar

from harness.config import config
from harness.engine.engine import Engine
from harness.engine.strategy import Strategy
from strategies.flexgen_c.schedule import waiting_for_cpu_attention
from strategies.offloading.config import CpuAttentionConfig
from strategies.offloading.system import build_offloading, complete_policy


@config
class Config(CpuAttentionConfig):
    parallelism: ClassVar[str] = "tensor"


def build(config: Config, engine: Engine) -> Strategy:
    planned = complete_policy(
        config.policy,
        engine,
        packet_mb=config.packet_mb,
        padded=config.padding,
        extended=config.extended_model,
        gpu_attention=False,
        overlap="nothing",
    )
    return build_offloading(engine, planned, waiting_for_cpu_attention, paging=False, packet_mb=config.packet_mb)
