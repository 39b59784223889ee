"""Compute the shard of a model that one of several GPUs has under tensor parallelism (Megatron-LM's split).
Torch-free."""

from __future__ import annotations

from dataclasses import replace

from harness.config import require
from harness.model.spec import ModelSpec


def shard_spec(spec: ModelSpec, num_ranks: int) -> ModelSpec:
    """Return the part of the model that each of `num_ranks` GPUs stores and computes: its heads, and its part of every
    MLP's intermediate dimension.

    With more ranks than KV heads, several ranks keep each KV head. Raises ConfigError("hardware.num_gpus", ...) where
    the dimensions cannot be divided.
    """

    def divided(name: str) -> int:
        size: int = getattr(spec, name)
        message = f"must divide the model's {name} {size}, got {num_ranks}"
        require(size % num_ranks == 0, "hardware.num_gpus", message)
        return size // num_ranks

    message = f"must be 1 for GPUs that share heads: {spec.name} has norms over all of them (qk_norm), got {num_ranks}"
    require(num_ranks == 1 or spec.qk_norm != "full", "hardware.num_gpus", message)
    kv_heads = spec.num_kv_heads
    message = f"must divide the model's num_kv_heads {kv_heads} or be a multiple of it, got {num_ranks}"
    require(kv_heads % num_ranks == 0 or num_ranks % kv_heads == 0, "hardware.num_gpus", message)
    return replace(
        spec,
        num_heads=divided("num_heads"),
        num_kv_heads=max(1, kv_heads // num_ranks),
        expert_dim=divided("expert_dim"),
        shared_expert_dim=divided("shared_expert_dim"),
        dense_dim=divided("dense_dim"),
    )


def shard_start(whole: int, mine: int, rank: int, num_ranks: int) -> int:
    """Return where the shard of `mine` out of `whole` begins that rank `rank` has. There are `whole // mine` shards:
    one for each rank, or one for several neighbouring ranks, or a single one for all ranks."""
    assert whole % mine == 0, f"{mine} is no shard of {whole}"
    num_shards = whole // mine
    assert num_ranks % num_shards == 0, f"{num_ranks} ranks cannot have {num_shards} shards"
    return rank * num_shards // num_ranks * mine
