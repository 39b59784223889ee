"""DeepSpeed ZeRO-Inference as MoE-Lightning compares with it (paper section 5.1): weights in pinned host memory, layer
by layer through the device with the next layer on its way; one batch at a time, whose KV cache and attention are on the
device, so that device memory bounds the batch; prefill and decode apart. Several GPUs are data-parallel: each has a
batch of its own, and brings its share of every layer, which an all-gather makes whole on all of them.
"""

from __future__ import annotations

from harness.engine.engine import Engine
from harness.engine.kv_placement import place_kv_by_gpu
from harness.engine.strategy import Strategy
from strategies.common.sequential import SequentialPipeline
from strategies.common.side_by_side import SideBySide
from strategies.common.static_batches import StaticBatches
from strategies.deepspeed_zero.config import Config
from strategies.deepspeed_zero.planner import plan_batch

__all__ = ["Config", "build"]


def build(config: Config, engine: Engine) -> Strategy:
    """Size a GPU's batch for its memory and put its KV cache there."""
    policy = plan_batch(config, engine)
    caches = place_kv_by_gpu(engine, device_bytes=policy.kv_bytes)
    schedulers = [
        StaticBatches(
            engine.sequences[rank :: len(caches)],
            cache.allocator,
            max_pass_tokens=policy.max_pass_tokens,
            max_batch=policy.batch_size,
        )
        for rank, cache in enumerate(caches)
    ]
    return Strategy(
        scheduler=SideBySide(schedulers) if engine.peers else schedulers[0],
        pipeline=SequentialPipeline(
            engine,
            max_tokens=policy.max_pass_tokens,
            packet_bytes=int(config.packet_mb * 1e6),
            prefetch=config.prefetch,
            own_sequences=True,
        ),
        plan=policy.as_record(),
    )
