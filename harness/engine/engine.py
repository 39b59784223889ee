"""Strategies are given this: a machine, a model in its memory, a KV cache, and the sequences of the workload."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from harness.engine.sequences import Sequence
from harness.machine.base import Machine
from harness.memory.kv_cache import KVCache
from harness.memory.split_kv import SplitKVCache
from harness.memory.weights import Resident, WeightStore
from harness.model.spec import ModelSpec


@dataclass(eq=False, kw_only=True)
class Engine:
    """An engine has one loaded model on one machine, and the requests to serve, in the order of their arrival.

    Where several GPUs share the model, this is GPU 0 and `peers` are the other GPUs, each an engine of its own. Under
    tensor parallelism `spec`, store and cache are the part of every layer that the GPU stores and computes. Otherwise
    each engine has those of the whole model, and the pipeline decides which GPU computes what.
    """

    machine: Machine
    spec: ModelSpec
    family: Any  # module of layer math under harness/model/families
    store: WeightStore
    resident: Resident
    kv: KVCache | SplitKVCache
    sequences: list[Sequence] = field(default_factory=list)
    eos_token_id: int | None = None  # None: generate max_new_tokens whatever is sampled
    rank: int = 0
    peers: tuple[Engine, ...] = ()

    @property
    def ranks(self) -> tuple[Engine, ...]:
        """The engines of all GPUs, this one first."""
        return (self, *self.peers)

    @property
    def stages(self) -> tuple[Engine, ...]:
        """The engines of all GPUs, each as if it were the only one."""
        return tuple(replace(each, peers=()) for each in self.ranks)
