"""Describe a system as it was published: its own planner, and the defaults that planner goes with. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from harness.config import ConfigError
from harness.memory.tiers import PAGEABLE, PINNED, RAM
from harness.model.spec import ModelSpec
from strategies.offloading.planning.memory import Deployment, kv_bytes_per_sequence
from strategies.offloading.planning.policy import GivenPolicy


@dataclass(frozen=True, kw_only=True)
class Published:
    """A published planner chooses these sizes for a batch. `resident` is the share on the device of what it streams,
    before whole parts are kept; `host_bytes` are what its own memory model counts, `rate` is what it maximises."""

    batch_size: int
    micro_batch_size: int
    resident: float
    host_bytes: float
    rate: float


Plan = Callable[[int, int], Published | None]  # of a micro-batch and a batch; None where memory is too small


@dataclass(frozen=True, kw_only=True)
class AsBuilt:
    """A published system is described by what its own planner, memory model and staging do. `complete` fills in what
    `given` leaves open; it raises ConfigError where nothing fits."""

    complete: Callable[[Deployment, GivenPolicy], GivenPolicy]
    staging: bool  # weights in pageable memory
    padding: bool
    pin_threads: int  # that copy weights from pageable to pinned memory, for each GPU
    pin_thread_gb_s: Callable[[ModelSpec], float | None] = lambda _: None  # of one of them; None: the profile's
    cpu_attention_times: Callable[[ModelSpec], float | None] = lambda _: None  # as long as by the kernel here
    in_turn: bool = False  # what copies pageable memory, that of the cache too, launches the GPU's work as well
    sources: dict[str, str]  # of planner, memory model and staging
    as_in_best: tuple[str, ...]  # what is not published, or not modelled here

    def as_record(self) -> dict[str, str]:
        """Return what a plan tells of it: each part with its source, and what stays as in `best`."""
        return {**self.sources, "as_in_best": "; ".join(self.as_in_best)}


def best_plan(plan: Plan, sizes: Iterable[int], given: GivenPolicy, where: str, *, fewest: int = 1) -> Published:
    """Return the plan with the highest rate over micro-batch sizes, up to the first that does not fit.

    What is given of the sizes is kept; otherwise a batch has `fewest` micro-batches or more. Raises ConfigError, which
    says `where` nothing fits.
    """
    best = None
    for size in sizes if given.micro_batch_size is None else [given.micro_batch_size]:
        found = _most_micro_batches(plan, size, fewest) if given.batch_size is None else plan(size, given.batch_size)
        if found is None:
            break
        if best is None or found.rate > best.rate:
            best = found
    if best is None:
        raise ConfigError("strategy.planning", f"as_built: {where}")
    return best


def _most_micro_batches(plan: Plan, size: int, fewest: int) -> Published | None:
    """Return the plan with as many micro-batches as raise the rate; None where not even the fewest fit."""
    best = None
    for number in count(fewest):
        found = plan(size, number * size)
        if found is None or (best is not None and found.rate <= best.rate * (1 + 1e-9)):
            break
        best = found
    return best


def completed(given: GivenPolicy, **chosen: Any) -> GivenPolicy:
    """Fill in with what is chosen the parts that are not given."""
    return replace(given, **{name: value for name, value in chosen.items() if getattr(given, name) is None})


def host_bytes(deployment: Deployment) -> int:
    """Return the host memory, pinned and pageable together."""
    tiers = deployment.capacities_bytes
    return tiers[RAM] if RAM in tiers else tiers[PINNED] + tiers[PAGEABLE]


def is_in_cache(deployment: Deployment, batch: int) -> bool:
    """Tell whether the cache holds the batch, where its size is given; a planner's own is as large as it wants."""
    given = deployment.storage.kv_cache_bytes
    return given is None or batch * deployment.num_gpus * kv_bytes_per_sequence(deployment) <= given
