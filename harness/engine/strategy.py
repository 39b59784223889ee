"""A strategy gives the engine a scheduler, a pipeline, and its planner's and its model's results."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from harness.config import require
from harness.engine.batch import MicroBatch, PassPlan
from harness.engine.in_flight import InFlight
from harness.engine.sequences import Sequence
from harness.memory.placed import ModelParts
from harness.memory.tiers import PINNED
from harness.memory.weights import layer_slots
from harness.model.spec import ModelSpec


def require_packet_mb(packet_mb: float) -> None:
    """Refuse packets of transfers below 1 KB or above 1 TB: a strategy's Config asks this of its `packet_mb`."""
    require(1e-3 <= packet_mb <= 1e6, "packet_mb", f"must lie between 0.001 and 1e6, got {packet_mb:g}")


# Whose planner decides: the one that was published with the system, with its memory model, staging and defaults; or our
# search on this engine. A Config with this field is that of a system with a planner of its own.
Planning = Literal["as_built", "best"]


def planned_alike(planning: Planning, why: str) -> dict[str, str]:
    """Return what a plan says where the published planner is the one that runs here, so that both ways are the same."""
    return {"planning": planning, "as_built_is_best": why}


def pin_threads(config: Any) -> int | None:
    """Return the threads that a strategy has to stage pageable weights: its Config's `pin_threads`, or None."""
    threads: int | None = getattr(config, "pin_threads", None)
    return threads


def pin_thread_gb_s(config: Any, spec: ModelSpec) -> float | None:
    """Return what one of these threads copies: what its Config's `pin_thread_gb_s` says of the model, or None where the
    profile says it."""
    return _stated(config, "pin_thread_gb_s", spec)


def cpu_attention_times(config: Any, spec: ModelSpec) -> float | None:
    """Return how many times as long as here a published system attends on the CPU: what its Config's
    `cpu_attention_times` says of the model, or None."""
    return _stated(config, "cpu_attention_times", spec)


def _stated(config: Any, name: str, spec: ModelSpec) -> float | None:
    stated: Callable[[ModelSpec], float | None] | None = getattr(config, name, None)
    return None if stated is None else stated(spec)


def weights_tier(config: Any) -> str:
    """Return the tier of host memory in which a strategy wants the model: its Config's `weights_tier`, or pinned."""
    tier: str = getattr(config, "weights_tier", PINNED)
    return tier


def least_weight_bytes(config: Any, model: ModelParts) -> dict[str, int]:
    """Return, by name, the device memory without which a strategy cannot bring its weights. Its Config's
    `least_weight_bytes` says that of a model; without it two whole layers, one that comes while the other computes."""
    stated: Callable[[ModelParts], dict[str, int]] | None = getattr(config, "least_weight_bytes", None)
    return layer_slots(model, 2) if stated is None else stated(model)


# How several GPUs share the model: the layers' dimensions ("tensor"); the requests, while each brings a share of every
# layer to all ("data"); or the layers ("pipeline").
Parallelism = Literal["tensor", "data", "pipeline"]


def parallelism(config: Any) -> Parallelism:
    """Return how GPUs share the model: a Config's `parallelism`, or "tensor". A strategy without it runs on one GPU,
    where all kinds are the same."""
    chosen: Parallelism = getattr(config, "parallelism", "tensor")
    return chosen


class Scheduler(Protocol):
    """Decides which sequences are in the next pass; pure bookkeeping, no torch."""

    def next_pass(self) -> PassPlan | None:
        """Return the next pass, with KV blocks taken for each of its tokens, or None when nothing is left to do."""

    def retire(self, plan: PassPlan, ended: list[Sequence]) -> None:
        """Note that the pass is over: `ended` have finished (blocks freed), all other sequences decode on."""

    @property
    def num_waiting(self) -> int: ...


@dataclass(eq=False, slots=True)
class PassResult:
    """A pass's micro-batches with the tickets that the emitter has collected for each, in any order; the loop waits for
    them. Where several GPUs have sequences of their own, each has a micro-batch of its own.

    Where a pipeline holds ops of a pass back, `complete` submits them, and only then are all tickets there.
    """

    in_flight: Seq[InFlight]
    complete: Callable[[], None] = lambda: None

    @property
    def micro_batches(self) -> list[MicroBatch]:
        """The micro-batches alone, in the same order."""
        return [it.batch for it in self.in_flight]


class Pipeline(Protocol):
    """Decides which ops run in which order on which lanes."""

    def run(self, plan: PassPlan) -> PassResult:
        """Submit one pass, or as much of it as its order among other passes in flight allows."""

    def finish(self) -> None:
        """Withdraw what was prefetched in vain, after the last pass is over."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A prediction is what a strategy's own equations say of a run before it begins."""

    throughput_tok_s: float
    model: str  # the paper's name for the model and the case that applied
    terms: dict[str, float] = field(default_factory=dict)


@dataclass(eq=False, kw_only=True)
class Strategy:
    """A strategy, once planned, is a scheduler that makes up passes and a pipeline that runs them."""

    scheduler: Scheduler
    pipeline: Pipeline
    prediction: Prediction | None = None
    passes_in_flight: int = 1  # passes that the pipeline can have under way; each has sequences of its own
    gpu_tok_s: float | None = None  # tokens per second at which the GPU is saturated (T_GPU)
    plan: dict[str, Any] = field(default_factory=dict)  # the planner's decisions, for the records
    counted: Callable[[], dict[str, Any]] = dict  # what its parts have counted since the start, for the summary
