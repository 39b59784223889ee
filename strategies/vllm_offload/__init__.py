"""vLLM with `--cpu-offload-gb` computes all on the GPU, and a part of the weights comes over the link in every pass.

Scheduler, defaults and offloading follow vLLM 0.8.4 (`vllm/v1/core/sched/scheduler.py`, `vllm/engine/arg_utils.py`,
`vllm/model_executor/models/utils.py`). Its KV cache is on the device in blocks, in what is left of
`gpu_memory_utilization` beside weights and the activations of the largest pass. A pass has every running sequence and
as many waiting prompts as `max_num_batched_tokens` and `max_num_seqs` allow. When blocks run out, the newest sequence
gives all of its blocks back, goes to the queue's head, and is prefilled again with what it has generated.

Offloading. vLLM walks through the decoder layers and moves their parameters to pinned host memory until
`cpu_offload_gb` is reached: the first layers are offloaded, the last ones stay, and so do embedding and head. The V0
engine copies a layer's offloaded parameters to the device when the layer's forward begins, on the stream that then
computes. The V1 engine copies nothing: its kernels read pinned memory over the link (UVA). Neither begins with a weight
before the op that uses it, so transfer and computation alternate. That is `prefetch=false`, the default: a part comes
when its turn does, is used, and is dropped. With `prefetch=true`, a layer's weights come while the layer before it
computes, as in later versions under `--offload-backend prefetch`, where the offloaded layers are spread over the model.

Three things differ. Prompts are computed whole, as with `--no-enable-chunked-prefill` (V1 cuts the last prompt of a
pass); so a prompt that is longer than a pass may be is its pass's only one. All offloaded experts come in every pass,
as V0's copies do; V1's kernels read only those that have tokens, which is less in batches so small that some have none.
And zero-copy reads are charged as copies at the link's full rate, which no kernel exceeds.

With `continuous_batching=false` a batch is prefilled and then decoded to its end before the next is admitted, which is
how MoE-Gen compares its baselines where it can.
"""

from __future__ import annotations

from harness.engine.engine import Engine
from harness.engine.kv_placement import place_kv
from harness.engine.strategy import Scheduler, Strategy
from strategies.common.continuous_batches import ContinuousBatches
from strategies.common.sequential import SequentialPipeline
from strategies.common.static_batches import StaticBatches
from strategies.vllm_offload.config import Config
from strategies.vllm_offload.planner import Policy, plan_policy

__all__ = ["Config", "build"]


def build(config: Config, engine: Engine) -> Strategy:
    """Load the resident weights, place the KV cache in device memory, and put scheduler and pipeline together."""
    policy = plan_policy(config, engine)
    for each in engine.ranks:
        each.resident.keep("resident weights", policy.resident)
    place_kv(engine, device_bytes=policy.kv_bytes)
    pipeline = SequentialPipeline(
        engine,
        max_tokens=policy.max_pass_tokens,
        packet_bytes=int(config.packet_mb * 1e6),
        prefetch=config.prefetch,
    )
    return Strategy(scheduler=_scheduler(config, policy, engine), pipeline=pipeline, plan=policy.as_record())


def _scheduler(config: Config, policy: Policy, engine: Engine) -> Scheduler:
    if not config.continuous_batching:
        return StaticBatches(
            engine.sequences,
            engine.kv.allocator,
            max_pass_tokens=policy.max_pass_tokens,
            max_batch=policy.max_num_seqs,
        )
    return ContinuousBatches(
        engine.sequences,
        engine.kv,
        fill_to=policy.batched_tokens,
        max_pass_tokens=policy.max_pass_tokens,
        max_sequences=policy.max_num_seqs,
    )
