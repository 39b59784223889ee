"""What several GPUs have of one thing: each its own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Generic, TypeVar

from harness.engine.activation_pool import PooledActivations
from harness.memory.tiers import Buffer

T = TypeVar("T")


class Sharded(Generic[T]):
    """One of a kind for each GPU, by rank."""

    def __init__(self, shards: Iterable[T]) -> None:
        self.shards = tuple(shards)


def shard_of(value: Any, rank: int) -> Any:
    """What a GPU gets of an argument: its own of what is sharded, also within a mapping; of others the argument."""
    if isinstance(value, Sharded):
        return value.shards[rank]
    if isinstance(value, dict):
        return {key: shard_of(item, rank) for key, item in value.items()}
    return value


def shards_of(value: Any) -> tuple[Any, ...]:
    """What the GPUs have, by rank; or the one thing that there is."""
    return value.shards if isinstance(value, Sharded) else (value,)


class ShardedActivations(Sharded[PooledActivations]):
    """A micro-batch's share of the pools of all GPUs, the first of which keeps the hidden states for all."""

    @property
    def kept_hidden(self) -> Buffer | None:
        return self.shards[0].kept_hidden

    def all_buffers(self) -> tuple[Buffer, ...]:
        return tuple(buffer for shard in self.shards for buffer in shard.all_buffers())
