"""MoE-Lens overlaps prefill and decode by resource-aware scheduling on the VSLPipe pipeline (paper sections 5, 6)."""

from __future__ import annotations

from harness.engine.engine import Engine
from harness.engine.strategy import Strategy, planned_alike
from strategies.common.continuous_batches import ContinuousBatches
from strategies.moelens.config import Config
from strategies.moelens.planner import plan_policy
from strategies.moelens.prediction import predict
from strategies.moelens.vslpipe import VSLPipe

__all__ = ["Config", "build"]


def build(config: Config, engine: Engine) -> Strategy:
    """Measure the pipeline, decide n_real, and put scheduler, pipeline and performance model together."""
    policy = plan_policy(config, engine)
    if config.overlap_prefill_decode:
        scheduler = ContinuousBatches(
            engine.sequences, engine.kv, fill_to=policy.n_real, max_pass_tokens=policy.max_pass_tokens
        )
    else:
        from strategies.common.static_batches import StaticBatches

        longest_prompt = max((s.prompt_len for s in engine.sequences), default=1)  # must run, as it does with overlap
        scheduler = StaticBatches(  # type: ignore[assignment]
            engine.sequences, engine.kv.allocator, max_pass_tokens=max(policy.n_real, longest_prompt)
        )
    if config.pipeline == "vslpipe":
        pipeline = VSLPipe(engine, config, max_tokens=policy.max_pass_tokens)
    else:
        from strategies.common.sequential import SequentialPipeline

        pipeline = SequentialPipeline(  # type: ignore[assignment]
            engine, max_tokens=policy.max_pass_tokens, packet_bytes=int(config.packet_mb * 1e6), prefetch=True
        )
    return Strategy(
        scheduler=scheduler,
        pipeline=pipeline,
        prediction=predict(config, policy, engine),
        gpu_tok_s=policy.profile.gpu_tok_s(engine.spec.num_layers),
        plan={**planned_alike(config.planning, "the profiler of MoE-Lens §6.3 decides"), **policy.as_record()},
    )
