"""MoE-Gen collects the tokens of many micro-batches for each expert (module-based batching)."""

from __future__ import annotations

from typing import Any

from harness.engine.engine import Engine
from harness.engine.strategy import Strategy
from strategies.moegen.config import Config
from strategies.moegen.memory import phases
from strategies.moegen.pipeline import ModuleBatching
from strategies.moegen.planner import Deployment, complete_by_memory
from strategies.moegen.prediction import predict
from strategies.moegen.profile import measured
from strategies.moegen.recorded import PassTimes
from strategies.moegen.scheduler import AccumulatedBatches
from strategies.moegen.search import Search

__all__ = ["Config", "build"]


def build(config: Config, engine: Engine) -> Strategy:
    """Choose the policy, and build the scheduler and the pipeline that run it."""
    deployment = Deployment.of(engine, padded=config.padding)
    packet_bytes = int(config.packet_mb * 1e6)
    policy = complete_by_memory(config.policy, deployment, prefetch=config.prefetch)
    plan: dict[str, Any] = {"chosen_by": "memory alone"}
    prediction = None
    profile = measured(engine, deployment.shape, packet_bytes=packet_bytes) if config.search else None
    if profile is not None:
        times = PassTimes(
            engine=engine, shape=deployment.shape, cost=profile.costs.seconds, packet_bytes=packet_bytes
        )  # fmt: skip
        search = Search(deployment, times, config.policy)
        found = search.around(policy)
        policy, prediction = found.best.policy, predict(search, found.best.policy)
        plan = {"chosen_by": "search", **found.as_record(), "profile": profile.as_record()}
    pipeline = ModuleBatching(engine, policy, deployment.shape, packet_bytes=packet_bytes)
    prefill, _ = phases(policy, deployment.shape)
    scheduler = AccumulatedBatches(engine.sequences, engine.kv.allocator, policy, prefill, padded=config.padding)
    return Strategy(
        scheduler=scheduler,
        pipeline=pipeline,
        prediction=prediction,
        plan={**policy.as_record(), "held_bytes": deployment.held(policy), **plan},
    )
