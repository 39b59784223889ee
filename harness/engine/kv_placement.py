"""Place the KV cache: in host memory, in device memory, or a share of it in either. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

from harness.engine.engine import Engine
from harness.machine.base import Machine
from harness.memory.kv_cache import KVCache
from harness.memory.split_kv import SplitKVCache
from harness.memory.tiers import DEVICE
from harness.model.spec import ModelSpec

_PINNED = "pinned"


def place_kv(engine: Engine, *, host_bytes: int = 0, device_bytes: int = 0) -> None:
    """Replace the engine's KV cache, of which no block may be held, by one of these sizes.

    `device_bytes` is for each GPU, `host_bytes` for all together: where several GPUs share the model, each keeps its
    own heads of every token. Raises MemoryCapacityError where a tier has too little left.
    """
    block_size = engine.kv.allocator.block_size
    engine.kv.close()
    caches = make_kv(
        engine.machine,
        [each.spec for each in engine.ranks],
        block_size=block_size,
        host_bytes=host_bytes,
        device_bytes=device_bytes,
    )
    for each, cache in zip(engine.ranks, caches, strict=True):
        each.kv = cache


def place_kv_by_gpu(engine: Engine, *, device_bytes: int) -> list[KVCache]:
    """Replace the engine's KV cache by one in each GPU's memory, each for sequences of its own, and return these
    caches. `device_bytes` is for each GPU. No block may be held. Raises MemoryCapacityError where a tier has too little
    left."""
    block_size = engine.kv.allocator.block_size
    engine.kv.close()
    caches = [
        KVCache(
            each.machine, each.spec, capacity_bytes=device_bytes, block_size=block_size, tier=DEVICE, rank=each.rank
        )
        for each in engine.ranks
    ]
    for each, cache in zip(engine.ranks, caches, strict=True):
        each.kv = cache
    if engine.peers:
        engine.kv = SplitKVCache(*caches)
    return caches


def make_kv(
    machine: Machine, specs: Sequence[ModelSpec], *, block_size: int, host_bytes: int = 0, device_bytes: int = 0
) -> list[KVCache | SplitKVCache]:
    """Return a cache for each rank, whose shares of the model are `specs`; all share the blocks of the first.
    `device_bytes` is for each GPU, `host_bytes` for all together. Raises MemoryCapacityError where a tier has too
    little left."""
    assert host_bytes or device_bytes, "a cache needs memory on some side"
    made: list[KVCache | SplitKVCache] = []

    def part(rank: int, spec: ModelSpec, tier: str, nbytes: int) -> KVCache | None:
        like = None if not made else made[0].device if tier == DEVICE else made[0].host
        if not nbytes:
            return None
        return KVCache(machine, spec, capacity_bytes=nbytes, block_size=block_size, tier=tier, rank=rank, like=like)

    for rank, spec in enumerate(specs):
        device = part(rank, spec, DEVICE, device_bytes)
        host = part(rank, spec, _PINNED, host_bytes // len(specs))
        made.append(SplitKVCache(device, host) if device and host else device or host)  # type: ignore[arg-type]
    return made
