"""DeepSpeed ZeRO-Inference as MoE-Lightning compares with it (paper section 5.1): weights in pinned host memory, layer
by layer through the device with the next layer on its way; one batch at a time, whose KV cache and attention are on the
device, so that device memory bounds the batch; prefill and decode apart.
"""

from __future__ import annotations

from harness.engine.engine import Engine
from harness.engine.kv_placement import place_kv
from harness.engine.strategy import Strategy
from strategies.common.sequential import SequentialPipeline
from strategies.common.static_batches import StaticBatches
from strategies.deepspeed_zero.config import Config
from strategies.deepspeed_zero.planner import plan_batch

__all__ = ["Config", "build"]


def build(config: Config, engine: Engine) -> Strategy:
    """Size the batch for the device's memory and put its KV cache there."""
    policy = plan_batch(config, engine)
    place_kv(engine, device_bytes=policy.kv_bytes)
    return Strategy(
        scheduler=StaticBatches(
            engine.sequences,
            engine.kv.allocator,
            max_pass_tokens=policy.max_pass_tokens,
            max_batch=policy.batch_size,
        ),
        pipeline=SequentialPipeline(
            engine,
            max_tokens=policy.max_pass_tokens,
            packet_bytes=int(config.packet_mb * 1e6),
            prefetch=config.prefetch,
        ),
        plan=policy.as_record(),
    )
