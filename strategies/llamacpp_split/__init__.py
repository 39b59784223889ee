"""llama.cpp with `--n-cpu-moe N` leaves the routed experts of the first N layers in host memory; all else is on the
device.

The CPU computes these experts where they lie. For micro-batches of 32 tokens and more, which are mostly prompts, they
are copied to the device and computed there, for that micro-batch only. The KV cache is on the device. llama.cpp
overlaps neither the copies nor the CPU's part with anything, so nothing overlaps here. Requests share slots as in
llama-server: continuous batching, prompts beside generation.

Of llama.cpp's own code, `ggml/src/ggml-backend.cpp` was read, at commit 0054c01: that only chosen experts are copied,
into which room, and who waits for whom. The threshold of 32 tokens, the order in which `--n-cpu-moe` counts layers, and
the defaults of `--batch-size`, `--ubatch-size` and `--parallel` are as its documentation and its forks have them.
Copies come from pinned memory, as with `--no-mmap`.
"""

from __future__ import annotations

from harness.engine.engine import Engine
from harness.engine.kv_placement import place_kv
from harness.engine.strategy import Strategy
from strategies.llamacpp_split.config import Config
from strategies.llamacpp_split.pipeline import SplitPipeline
from strategies.llamacpp_split.planner import plan_split
from strategies.llamacpp_split.scheduler import Slots

__all__ = ["Config", "build"]


def build(config: Config, engine: Engine) -> Strategy:
    policy = plan_split(config, engine)
    place_kv(engine, device_bytes=policy.kv_bytes)
    scheduler = Slots(
        engine.sequences,
        engine.kv.allocator,
        num_slots=policy.slots,
        batch_tokens=config.batch_tokens,
        micro_batch_tokens=config.micro_batch_tokens,
        max_tokens=policy.max_tokens,
    )
    pipeline = SplitPipeline(
        engine,
        policy,
        offload_min_tokens=config.offload_min_tokens,
        packet_bytes=int(config.packet_mb * 1e6),
    )
    return Strategy(scheduler=scheduler, pipeline=pipeline, plan=policy.as_record())
