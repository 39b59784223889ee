"""DeepSpeed ZeRO-Inference, as MoE-Lightning compares with it (paper section 5.1), streams weights from pinned host
memory through the device.

Weights come layer by layer, with the next layer on its way. One batch runs at a time, with its KV cache and attention
on the device, so that device memory bounds the batch; prefill and decode are apart. Several GPUs are data-parallel:
each has a batch of its own and brings its share of every layer, and an all-gather makes the layer whole on all of them.
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
    """Choose a batch size that each GPU's memory allows, and put the batch's KV cache there."""
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
