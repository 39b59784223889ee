"""The sizes of a micro-batched pipeline's buffers."""

from __future__ import annotations

from dataclasses import dataclass

from harness.engine.activation_pool import PoolSizes


@dataclass(frozen=True, kw_only=True)
class MicroBatchMemory:
    """The memory of micro-batches, with room for the longest request and not only for mean ones.

    `prompt_tokens` and `cached_tokens` limit a micro-batch's prompts and its KV cache. The prompts of a whole batch go
    through the device in one pass; those of a micro-batch go in several parts where they exceed the pool's largest.
    """

    pool: PoolSizes
    prompt_tokens: int
    cached_tokens: int
    kv_relay_bytes: int  # in pinned memory, of one of two; 0 where keys and values cross the link directly
    kv_staging_bytes: int  # of each of two buffers; 0 where the CPU attends
