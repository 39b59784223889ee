"""Assemble an engine from a model's source and a machine: weights and KV cache in memory, on one GPU or shared by
several."""

from __future__ import annotations

from harness.config import require
from harness.engine.engine import Engine
from harness.engine.kv_placement import make_kv
from harness.engine.ops.warm_up import StartThreads, WarmUp
from harness.engine.sequences import Sequence
from harness.engine.strategy import Parallelism
from harness.machine.base import CPU, GPU, Lane, LaneKind, Machine
from harness.memory.placed import PartSource, ShardedSource
from harness.memory.tiers import PINNED
from harness.memory.weights import Resident, WeightStore, stored_bytes


def rank_sources(source: ShardedSource, num_gpus: int, parallelism: Parallelism = "tensor") -> list[PartSource]:
    """Return the source of each GPU's part of the model. Raises ConfigError("hardware.num_gpus", ...) where the model
    cannot be divided."""
    num_layers = source.spec.num_layers
    if parallelism == "pipeline":
        valid, message = num_layers % num_gpus == 0, f"must divide the model's {num_layers} layers, got {num_gpus}"
        require(valid, "hardware.num_gpus", message)
    if num_gpus == 1 or parallelism != "tensor":
        return [source] * num_gpus
    return [source.shard(rank, num_gpus) for rank in range(num_gpus)]


def host_weight_bytes(source: ShardedSource, num_gpus: int, parallelism: Parallelism = "tensor") -> int:
    """Return the bytes that the host stores of the model: one whole, or the shares of all GPUs with the ends once."""
    first, *others = rank_sources(source, num_gpus, parallelism)
    divided = others if parallelism == "tensor" else []
    return stored_bytes(first) + sum(stored_bytes(other, ends=False) for other in divided)


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
    parallelism: Parallelism = "tensor",
) -> Engine:
    """Load the weights into a tier of host memory and reserve memory for a KV cache of `kv_bytes` there.

    Raises ConfigError as above and MemoryCapacityError where a tier has too little.
    """
    sources, last = rank_sources(source, num_gpus, parallelism), num_gpus - 1
    first = WeightStore(machine, sources[0], tier=weights_tier)
    specs = [each.spec for each in sources]
    if parallelism == "tensor":
        stores = [first, *(WeightStore(machine, other, tier=weights_tier, first=first) for other in sources[1:])]
        caches = make_kv(machine, specs, block_size=block_size, host_bytes=kv_bytes)
    else:
        stores = [first] * num_gpus
        caches = make_kv(machine, specs[:1], block_size=block_size, host_bytes=kv_bytes) * num_gpus
    # By rank, whether the GPU needs the embedding and whether it needs the head.
    ends = {
        "tensor": [(True, rank == 0) for rank in range(num_gpus)],
        "data": [(True, True)] * num_gpus,
        "pipeline": [(rank == 0, rank == last) for rank in range(num_gpus)],
    }[parallelism]
    residents = [
        Resident(machine, store, rank=rank, embedding=embedding, head=head)
        for rank, (store, (embedding, head)) in enumerate(zip(stores, ends, strict=True))
    ]

    def engine_of(rank: int, peers: tuple[Engine, ...] = ()) -> Engine:
        return Engine(
            machine=machine,
            spec=specs[rank],
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
        for lane in (CPU, Lane(LaneKind.PIN)):
            machine.submit(lane, StartThreads())
        if all(ends[0]):  # a pipeline's first stage has no head: it is not warmed up, and its first pass takes longer
            machine.wait(machine.submit(GPU, WarmUp(source.family, sources[0].spec, residents[0], block_size)))
        machine.drain()
    return engine_of(0, tuple(engine_of(rank) for rank in range(1, num_gpus)))
