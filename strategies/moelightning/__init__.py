"""MoE-Lightning is CGOPipe with paged weights, under a policy of six numbers (paper sections 4 and A)."""

from __future__ import annotations

from harness.engine.engine import Engine
from harness.engine.strategy import Strategy
from strategies.moelightning.cgopipe import cgopipe
from strategies.moelightning.config import Config
from strategies.offloading.gpu_attention import gpu_attention
from strategies.offloading.system import build_offloading, complete_policy

__all__ = ["Config", "build"]


def build(config: Config, engine: Engine) -> Strategy:
    """Build CGOPipe where the CPU attends. A policy with attention on the GPU falls back to FlexGen's schedule, in
    pages."""
    planned = complete_policy(
        config,
        engine,
        min_micro_batches=2,
        overlap="all" if config.paging else "weights apart",
    )
    return build_offloading(
        engine,
        planned,
        gpu_attention if planned.policy.gpu_attention else cgopipe,
        config,
        paging=config.paging,
        min_micro_batches=2,
    )
