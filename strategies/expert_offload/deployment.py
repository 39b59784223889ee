"""Divide device memory for a system that places experts, and build what it runs on.

All that is not a routed expert comes first, then the slots, then KV cache and activations of a batch; the table of hot
experts gets what is left, to the byte.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from harness.config import ConfigError, config, require
from harness.engine.activations import TABLE_ENTRY_BYTES, device_bytes_per_token, host_expert_bytes, prediction_bytes
from harness.engine.engine import Engine
from harness.engine.kv_placement import place_kv
from harness.engine.limits import SLACK_BYTES
from harness.engine.sequences import Sequence
from harness.engine.strategy import Strategy, require_packet_mb
from harness.memory.expert_slots import Key, Replacement, expert_slot_bytes, num_slots_that_fit
from harness.memory.kv_cache import Blocks
from harness.memory.placed import ModelParts
from harness.memory.tiers import DEVICE, PINNED, enough
from harness.memory.weights import expert_slots
from harness.model.spec import ModelSpec
from strategies.common.kv_on_device import cache_bytes, device_too_small
from strategies.common.predictors import Predictor
from strategies.common.static_batches import StaticBatches
from strategies.expert_offload.costs import ExpertCosts, measured_costs
from strategies.expert_offload.pipeline import ExpertPipeline
from strategies.expert_offload.placement import Placer
from strategies.expert_offload.popularity import Popularity, ProfileRun, profile, read_popularity
from strategies.expert_offload.residency import ExpertResidency

_MOST_PROFILED = 1 << 16  # tokens: all of them are remembered
_DENSE = "all layers without experts"


@config
class PlacementConfig:
    """The settings that all systems of this room have."""

    packet_mb: float = 1.0
    batch_size: int = 16
    max_pass_tokens: int = 4096
    table: Literal["hot", "random", "none"] = "hot"
    popularity: str | None = None
    profile_tokens: int = 512
    experts_together: bool = True

    def __post_init__(self) -> None:
        require_packet_mb(self.packet_mb)
        for name in ("batch_size", "max_pass_tokens", "profile_tokens"):
            value = getattr(self, name)
            require(value >= 1, name, f"must be >= 1, got {value}")
        told = f"must be at most {_MOST_PROFILED}, got {self.profile_tokens}"
        require(self.profile_tokens <= _MOST_PROFILED, "profile_tokens", told)
        told = f"must be null with table={self.table}, which asks for no popularity"
        require(self.table == "hot" or self.popularity is None, "popularity", told)

    def num_slots(self, spec: ModelSpec) -> tuple[int, int]:
        """Return the slots for experts on demand, and those for prefetches, that a system takes for such a model."""
        return 2, 0

    def least_weight_bytes(self, model: ModelParts) -> dict[str, int]:
        """Return the device memory that weights take at the least, by name."""
        return {_DENSE: dense_bytes(model)} | expert_slots(model, sum(self.num_slots(model.spec)))


def dense_bytes(model: ModelParts) -> int:
    """Return the bytes of all layers without their routed experts."""
    layers = (model.family.layer_parts(model.spec, layer) for layer in range(model.spec.num_layers))
    return sum(part.nbytes for parts in layers for part in parts if part.expert is None)


@dataclass(eq=False, kw_only=True)
class Deployment:
    """The memory of a system on an engine, taken; what is left of the device is for the table (`fill_table`)."""

    engine: Engine
    config: PlacementConfig
    pipeline: ExpertPipeline
    batch_size: int  # sequences that decode together
    max_tokens: int  # of a micro-batch
    costs: ExpertCosts | None = None
    profile_run: ProfileRun | None = None
    popularity: Popularity | None = None
    table: int = 0  # experts that stay on the device

    @classmethod
    def of(
        cls, config: PlacementConfig, engine: Engine, *, predictor: Predictor | None = None,
        num_micro_batches: Seq[int] = (1,), host_experts: bool = True, replacement: Replacement | None = None,
    ) -> Deployment:  # fmt: skip
        """Take all memory but the table's. Micro-batches are of `config.batch_size` each; of the numbers of them that
        may be, the first one is taken that has room for as many requests as any. `replacement` is the policy of the
        slots for experts on demand."""
        on_demand, prefetched = config.num_slots(engine.spec)
        dense = [(layer, name) for layer in range(engine.spec.num_layers) for name in engine.store.dense(layer)]
        engine.resident.keep(_DENSE, dense)
        num_predicted = predictor.num_predicted if predictor else 0
        sizes = _best_sizes(config, engine, num_micro_batches, host_experts, num_predicted)
        place_kv(engine, device_bytes=cache_bytes(engine, sizes.num_blocks))
        residency = ExpertResidency.reserve(
            engine, on_demand=on_demand, prefetched=prefetched, packet_bytes=int(config.packet_mb * 1e6),
            replacement=replacement,
        )  # fmt: skip
        pipeline = ExpertPipeline(
            engine, residency, max_tokens=sizes.max_tokens, num_micro_batches=sizes.num_micro_batches,
            host_experts=host_experts, predictor=predictor, experts_together=config.experts_together,
        )  # fmt: skip
        return cls(
            engine=engine, config=config, pipeline=pipeline, batch_size=sizes.batch_size, max_tokens=sizes.max_tokens
        )  # fmt: skip

    def measured(self) -> ExpertCosts:
        """Measure what moving and computing an expert takes on this machine."""
        self.costs = measured_costs(self.pipeline, batch_size=self.batch_size)
        return self.costs

    def profile(self) -> ProfileRun:
        """Run other prompts than the workload's, once, and return what was seen. The table must be empty still."""
        if self.profile_run is None:
            self.profile_run = profile(
                self.pipeline, num_tokens=self.config.profile_tokens, max_tokens=self.max_tokens
            )  # fmt: skip
        return self.profile_run

    def profiled(self) -> Popularity:
        """Find offline which experts are hot: from the file that the settings name, else by the profile run."""
        path, spec = self.config.popularity, self.engine.spec
        if self.popularity is None:
            self.popularity = read_popularity(path, spec) if path else self.profile().popularity(spec)
        return self.popularity

    def fill_table(self) -> None:
        """Keep experts on the device for good, as many as it has room for: the hottest, or any."""
        if ranked := self.ranked():
            self.table = len(self.pipeline.residency.keep(ranked))

    def most_cached(self) -> int:
        """Return the slots of the largest cache that the device has room for. It takes the place of the slots for
        experts on demand and of the table."""
        slots, store = self.pipeline.residency.on_demand, self.engine.store
        free_bytes = self.engine.machine.tiers[DEVICE].free_bytes + slots.num_slots * expert_slot_bytes(store)
        return num_slots_that_fit(store, free_bytes)

    def fill_cache(
        self, num_slots: int, replacement: Replacement, warm: Seq[Key], *, spares_prefetches: bool = False
    ) -> None:
        """Let a cache of so many slots take the place of those for experts on demand, where prefetches have none of
        their own. It begins with the experts of `warm`, as if they had been used, the first one last."""
        assert len(warm) <= num_slots, f"{len(warm)} experts for {num_slots} slots"
        self.pipeline.residency.make_cache(num_slots, replacement, warm, spares_prefetches=spares_prefetches)

    def ranked(self) -> list[Key]:
        """Return experts in the order in which they are worth device memory, as the settings say: the hottest first, or
        by lot; or none."""
        if self.config.table == "none":
            return []
        return self.profiled().hottest() if self.config.table == "hot" else self._shuffled()

    def _shuffled(self) -> list[tuple[int, int]]:
        """Return all experts in an order that knows nothing of them, the same in every run."""
        store = self.engine.store
        experts = [(layer, expert) for layer in self.engine.spec.moe_layers for expert in store.experts(layer)]
        order = np.random.default_rng(0).permutation(len(experts))
        return [experts[at] for at in order.tolist()]

    def scheduler(self, sequences: Seq[Sequence], blocks: Blocks) -> StaticBatches:
        """Return what schedules these sequences in these blocks."""
        return StaticBatches(sequences, blocks, max_pass_tokens=self.max_tokens, max_batch=self.batch_size)

    def strategy(self, placer: Placer, plan: dict[str, Any] | None = None, *, decided_here: Seq[str] = ()) -> Strategy:
        """Return the strategy of this placer, with static batches. `plan` is added to the records, and so is what was
        `decided_here`, since it is not published of the system or was not read."""
        self.pipeline.placer = placer
        return Strategy(
            scheduler=self.scheduler(self.engine.sequences, self.engine.kv.allocator),
            pipeline=self.pipeline,
            plan=self.as_record() | (plan or {}) | {"decided_here": list(decided_here)},
            counted=lambda: self.pipeline.residency.counts.as_record(),
        )

    def as_record(self) -> dict[str, Any]:
        """Return the plan's numbers, for the records."""
        on_demand, (_, prefetched) = self.pipeline.residency.on_demand, self.config.num_slots(self.engine.spec)
        record: dict[str, Any] = {
            "batch_size": self.batch_size, "max_tokens": self.max_tokens, "on_demand_slots": on_demand.num_slots,
            "prefetch_slots": prefetched, "table": self.config.table, "table_experts": self.table,
            "kv_blocks": self.engine.kv.allocator.num_blocks,
        }  # fmt: skip
        if self.profile_run is not None:
            record["profile_run"] = self.profile_run.source
        if self.popularity is not None:
            record["popularity"] = self.popularity.source
        if self.pipeline.predictor is not None:
            record["predictions"] = self.pipeline.predictor.source
        return record | ({"costs": self.costs.as_record()} if self.costs else {})


@dataclass(frozen=True)
class _Room:
    """The bytes left for KV cache and activations, and what each of them takes."""

    nbytes: int
    token_bytes: int
    block_bytes: int
    num_micro_batches: int

    def taken_bytes(self, prompt_tokens: int, batch_size: int, num_blocks: int) -> int:
        """Return the bytes of so many sequences with `num_blocks` each, whose longest prompt runs alone."""
        tokens = max(prompt_tokens, -(-batch_size // self.num_micro_batches))
        return tokens * self.token_bytes + batch_size * num_blocks * self.block_bytes

    def most_served(self, needs: Seq[tuple[int, int]]) -> tuple[int, int, int]:
        """Return how many requests can be served, and their longest prompt and most blocks, for which there is room
        together. `needs` are the prompts and blocks of all requests."""
        prompts, needed = np.array(needs).T
        found = (0, 0, 0)
        for longest in np.unique(prompts).tolist():
            left_bytes = self.nbytes - self.taken_bytes(longest, 1, 0)
            fits = (prompts <= longest) & (needed * self.block_bytes <= left_bytes)
            if (served := int(fits.sum())) > found[0]:
                found = (served, int(prompts[fits].max()), int(needed[fits].max()))
        return found


@dataclass(frozen=True, kw_only=True)
class _Sizes:
    """Sizes have the number of sequences that run together, of their KV blocks, and of the tokens of a micro-batch.

    There is room for `num_served` of the requests.
    """

    num_served: int
    batch_size: int
    num_blocks: int
    max_tokens: int
    num_micro_batches: int


def _best_sizes(
    config: PlacementConfig, engine: Engine, numbers: Seq[int], host_experts: bool, num_predicted: int
) -> _Sizes:
    """Return the sizes with the first number of micro-batches that has room for as many requests as any. Raises
    ConfigError where none has room for a request."""
    found, error = [], None
    for number in numbers:
        try:
            found.append(_sizes(config, engine, number, host_experts, num_predicted))
        except ConfigError as refused:
            error = refused
    if not found:
        assert error is not None, "no number of micro-batches"
        raise error
    return max(found, key=lambda sizes: sizes.num_served)


def _sizes(
    config: PlacementConfig, engine: Engine, num_micro_batches: int, host_experts: bool, num_predicted: int
) -> _Sizes:
    """Return the sizes with so many micro-batches.

    Room is made for as many requests as can be, by what they need alone; the scheduler rejects the others. Raises
    ConfigError where the smallest does not fit.
    """
    spec, blocks = engine.spec, engine.kv.allocator
    weights = expert_slots(engine, sum(config.num_slots(spec)))
    token_bytes = device_bytes_per_token(spec, engine.machine.gpu_kernels)
    token_bytes += sum(prediction_bytes(num_predicted).values())
    token_bytes += 4 * spec.hidden_dim if host_experts else 0
    room = _Room(
        nbytes=engine.machine.tiers[DEVICE].free_bytes - SLACK_BYTES - sum(weights.values()),
        token_bytes=num_micro_batches * token_bytes,
        block_bytes=cache_bytes(engine, 1) + num_micro_batches * TABLE_ENTRY_BYTES,
        num_micro_batches=num_micro_batches,
    )
    needs = [(s.prompt_len, blocks.blocks_for(s.max_tokens)) for s in engine.sequences] or [(1, 1)]
    served, prompt, num_blocks = room.most_served(needs)
    if not served:
        raise device_too_small(engine, weights, min(room.taken_bytes(p, 1, n) for p, n in needs))
    wanted = range(1, max(1, min(num_micro_batches * config.batch_size, len(engine.sequences))) + 1)
    batch_size = bisect_right(wanted, room.nbytes, key=lambda size: room.taken_bytes(prompt, size, num_blocks))
    left_bytes = room.nbytes - batch_size * num_blocks * room.block_bytes
    fitting = left_bytes // room.token_bytes
    if host_experts:
        fitting = min(fitting, _pinned_tokens(engine, num_micro_batches, at_least=max(prompt, batch_size)))
    most = max(prompt, batch_size, min(config.max_pass_tokens, batch_size * prompt))
    return _Sizes(
        num_served=served,
        batch_size=batch_size,
        num_blocks=batch_size * num_blocks,
        max_tokens=min(most, fitting),
        num_micro_batches=num_micro_batches,
    )


def _pinned_tokens(engine: Engine, num_micro_batches: int, *, at_least: int) -> int:
    """Return the tokens of each micro-batch for whose experts on the host pinned memory has room. The KV cache on the
    host is given up. Raises ConfigError where fewer than `at_least` fit."""
    pinned = engine.machine.tiers[PINNED]
    token_bytes = num_micro_batches * sum(host_expert_bytes(engine.spec).values())
    free_bytes = pinned.free_bytes + cache_bytes(engine, engine.kv.allocator.num_blocks) - SLACK_BYTES
    if free_bytes < at_least * token_bytes:
        needed = enough(pinned.capacity_bytes - free_bytes + at_least * token_bytes)
        told = f"{pinned.capacity_bytes / 1e9:g} GB is too small: {needed} GB are needed for experts on the CPU"
        raise ConfigError("hardware.pinned_memory_gb", told)
    return free_bytes // token_bytes
