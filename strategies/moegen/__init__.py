"""MoE-Gen collects the tokens of many micro-batches for each expert (module-based batching)."""

from __future__ import annotations

from harness.engine.engine import Engine
from harness.engine.strategy import Strategy
from strategies.moegen.config import Config
from strategies.moegen.memory import phases
from strategies.moegen.pipeline import ModuleBatching
from strategies.moegen.planner import Deployment, complete_by_memory
from strategies.moegen.scheduler import AccumulatedBatches

__all__ = ["Config", "build"]


def build(config: Config, engine: Engine) -> Strategy:
    """Complete the policy, and build the scheduler and the pipeline that run it."""
    deployment = Deployment.of(engine, padded=config.padding)
    policy = complete_by_memory(config.policy, deployment, prefetch=config.prefetch)
    pipeline = ModuleBatching(engine, policy, deployment.shape, packet_bytes=int(config.packet_mb * 1e6))
    prefill, _ = phases(policy, deployment.shape)
    scheduler = AccumulatedBatches(
        engine.sequences, engine.kv.allocator, policy, prefill, padded=config.padding
    )  # fmt: skip
    plan = {**policy.as_record(), "chosen_by": "memory alone", "held_bytes": deployment.held(policy)}
    return Strategy(scheduler=scheduler, pipeline=pipeline, plan=plan)
