"""FlexGen is schedule S4 of MoE-Lightning's Figure 6: attention is on the GPU, and KV is prefetched by micro-batch."""

from __future__ import annotations

from typing import ClassVar, Literal

from harness.config import config, require
from harness.engine.engine import Engine
from harness.engine.strategy import Strategy
from strategies.offloading.config import OffloadingConfig
from strategies.offloading.gpu_attention import gpu_attention
from strategies.offloading.in_turn import gpu_attention_in_turn, zigzag_in_turn
from strategies.offloading.published.as_built import AsBuilt
from strategies.offloading.published.flexgen import AS_BUILT
from strategies.offloading.system import build_offloading, complete_policy


@config
class Config(OffloadingConfig):
    published: ClassVar[AsBuilt | None] = AS_BUILT

    parallelism: Literal["pipeline", "tensor"] = "pipeline"  # of several GPUs; its paper's, or every layer shared

    def __post_init__(self) -> None:
        super().__post_init__()
        valid = self.policy.gpu_attention is not False
        require(valid, "policy.gpu_attention", "must be true or null: flexgen_c is the one with attention on the CPU")


def build(config: Config, engine: Engine) -> Strategy:
    planned = complete_policy(
        config,
        engine,
        gpu_attention=True,
        overlap="weights apart",
        stages=config.parallelism == "pipeline",
    )
    if config.is_in_turn:
        return build_offloading(engine, planned, gpu_attention_in_turn, config, paging=True, prefill=zigzag_in_turn)
    return build_offloading(engine, planned, gpu_attention, config, paging=False)
