"""FlexGen(c) is schedule S3 of MoE-Lightning's Figure 6: attention is on the CPU, and the GPU waits for it."""

from __future__ import annotations

from typing import ClassVar, Literal

from harness.config import config
from harness.engine.engine import Engine
from harness.engine.strategy import Strategy
from strategies.flexgen_c.schedule import waiting_for_cpu_attention
from strategies.offloading.config import CpuAttentionConfig
from strategies.offloading.in_turn import cpu_attention_in_turn, zigzag_in_turn
from strategies.offloading.published.as_built import AsBuilt
from strategies.offloading.published.flexgen import AS_BUILT_ON_CPU
from strategies.offloading.system import build_offloading, complete_policy


@config
class Config(CpuAttentionConfig):
    published: ClassVar[AsBuilt | None] = AS_BUILT_ON_CPU

    parallelism: Literal["pipeline", "tensor"] = "pipeline"  # of several GPUs; as FlexGen, or every layer shared


def build(config: Config, engine: Engine) -> Strategy:
    planned = complete_policy(
        config,
        engine,
        gpu_attention=False,
        overlap="nothing",
        stages=config.parallelism == "pipeline",
    )
    if config.is_in_turn:
        return build_offloading(engine, planned, cpu_attention_in_turn, config, paging=True, prefill=zigzag_in_turn)
    return build_offloading(engine, planned, waiting_for_cpu_attention, config, paging=False)
