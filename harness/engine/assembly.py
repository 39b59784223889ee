"""An engine from a model's source and a machine: weights and KV cache in memory, on one GPU or shared by several."""

from __future__ import annotations

from harness.engine.engine import Engine
from harness.engine.kv_placement import make_kv
from harness.engine.ops.warm_up import WarmUp
from harness.engine.sequences import Sequence
from harness.machine.base import GPU, Machine
from harness.memory.tiers import PINNED
from harness.memory.weights import PartSource, Resident, ShardedSource, WeightStore


def rank_sources(source: ShardedSource, num_gpus: int) -> list[PartSource]:
    """What each GPU has. Raises ConfigError("hardware.num_gpus", ...) where the model cannot be divided."""
    return [source] if num_gpus == 1 else [source.shard(rank, num_gpus) for rank in range(num_gpus)]


def assemble_engine(
    machine: Machine,
    source: ShardedSource,
    *,
    num_gpus: int,
    kv_bytes: int,
    block_size: int,
    sequences: list[Sequence],
    eos_token_id: int | None,
    weights_tier: str = PINNED,
) -> Engine:
    """Load the weights into a tier of host memory and take memory for a KV cache of `kv_bytes` there.

    Raises ConfigError as above and MemoryCapacityError where a tier has too little.
    """
    sources = rank_sources(source, num_gpus)
    stores = [WeightStore(machine, sources[0], tier=weights_tier)]
    stores += [WeightStore(machine, other, tier=weights_tier, first=stores[0]) for other in sources[1:]]
    residents = [Resident(machine, store, rank=rank) for rank, store in enumerate(stores)]
    caches = make_kv(machine, [each.spec for each in sources], block_size=block_size, host_bytes=kv_bytes)

    def engine_of(rank: int, peers: tuple[Engine, ...] = ()) -> Engine:
        return Engine(
            machine=machine,
            spec=sources[rank].spec,
            family=source.family,
            store=stores[rank],
            resident=residents[rank],
            kv=caches[rank],
            sequences=sequences,
            eos_token_id=eos_token_id,
            rank=rank,
            peers=peers,
        )

    if machine.warms_up:
        machine.wait(machine.submit(GPU, WarmUp(source.family, sources[0].spec, residents[0], block_size)))
    return engine_of(0, tuple(engine_of(rank) for rank in range(1, num_gpus)))
