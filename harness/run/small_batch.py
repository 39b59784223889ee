"""Tell where requests or the KV cache are set as for a laptop, on a machine that is none."""

from __future__ import annotations

from harness.engine.engine import Engine
from harness.memory.tiers import PINNED
from harness.record.terminal import human_bytes
from harness.settings import Settings

_FEW_REQUESTS = 4  # times the requests: a KV cache for so many never fills, so that the batch is not what memory allows
_SMALL_CACHE = 10  # times the KV cache: with so much memory free beside it, nobody has chosen its size


def requests_at_once(engine: Engine) -> int:
    """Return about how many of the engine's requests its KV cache holds to their ends at the same time."""
    kv, lengths = engine.kv.allocator, [s.max_tokens + 1 for s in engine.sequences]
    return kv.num_blocks * len(lengths) // max(1, sum(-(-length // kv.block_size) for length in lengths))


def small_batch(settings: Settings, engine: Engine) -> list[str]:
    """Return a line for each of the defaults that keep a real machine's batch small. `kv_cache_gb` sizes a cache in
    host memory only."""
    if settings.hardware.gpu is None:
        return []
    num_requests, at_once = len(engine.sequences), requests_at_once(engine)
    free_bytes, size_gb = engine.machine.tiers[PINNED].free_bytes, settings.kv_cache_gb
    told = []
    if at_once >= _FEW_REQUESTS * num_requests:
        told.append(f"only {num_requests:,} requests, of which the KV cache holds {at_once:,}: dataset.num_requests=N")
    if engine.kv.host is not None and at_once < num_requests and free_bytes > _SMALL_CACHE * size_gb * 1e9:
        told.append(f"kv_cache_gb={size_gb:g} is little beside {human_bytes(free_bytes)} that are free: kv_cache_gb=N")
    return [f"WARNING: {each} asks for more; these rates are those of a small batch" for each in told]
