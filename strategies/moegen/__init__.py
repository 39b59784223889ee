"""MoE-Gen collects the tokens of many micro-batches for each expert (module-based batching)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from harness.engine.engine import Engine
from harness.engine.strategy import Strategy, planned_alike
from strategies.moegen.config import Config
from strategies.moegen.memory import phases
from strategies.moegen.pipeline import ModuleBatching
from strategies.moegen.planner import Deployment, complete_by_memory
from strategies.moegen.prediction import predict
from strategies.moegen.profile import Profile, measured
from strategies.moegen.scheduler import AccumulatedBatches
from strategies.moegen.search import Search
from strategies.moegen.times import PassTimes

__all__ = ["Config", "build", "profiled_search"]


def build(config: Config, engine: Engine) -> Strategy:
    """Choose the policy, and build the scheduler and the pipeline that run it."""
    deployment = Deployment.of(engine, padded=config.padding)
    packet_bytes = int(config.packet_mb * 1e6)
    ready = profiled_search(config, engine, deployment) if config.search else None
    deployment = deployment if ready is None else ready[0].deployment
    policy = complete_by_memory(config.policy, deployment, prefetch=config.prefetch)
    alike = planned_alike(config.planning, "MoE-Gen's own search over the graph of its ops is what runs")
    plan: dict[str, Any] = {"chosen_by": "memory alone"}
    prediction = None
    if ready is not None:
        search, profile = ready
        found = search.around(policy)
        policy, prediction = found.best.policy, predict(search, found.best.policy)
        plan = {"chosen_by": "search", **found.as_record(), "profile": profile.as_record()}
    pipeline = ModuleBatching(
        engine, policy, deployment.shape, packet_bytes=packet_bytes, temporaries=deployment.temporaries
    )
    prefill, _ = phases(policy, deployment.shape)
    scheduler = AccumulatedBatches(engine.sequences, engine.kv.allocator, policy, prefill, padded=config.padding)
    return Strategy(
        scheduler=scheduler,
        pipeline=pipeline,
        prediction=prediction,
        plan={**alike, **policy.as_record(), "held_bytes": deployment.held(policy), **plan},
    )


def profiled_search(config: Config, engine: Engine, deployment: Deployment) -> tuple[Search, Profile] | None:
    """Return a search by what modules cost on the engine's machine and take of its memory, with that profile; None
    where there is none."""
    packet_bytes = int(config.packet_mb * 1e6)
    profile = measured(engine, deployment.shape, packet_bytes=packet_bytes)
    if profile is None:
        return None
    times = PassTimes(engine=engine, shape=deployment.shape, cost=profile.costs.seconds, packet_bytes=packet_bytes)
    return Search(replace(deployment, temporaries=profile.memory.temporaries), times, config.policy), profile
