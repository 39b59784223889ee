"""Plan a policy for an engine, from the workload's shape and the machine's rates, and predict what it should reach."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from math import ceil
from typing import Any

from harness.bench.shapes import Shape
from harness.engine.engine import Engine
from harness.engine.sequences import Sequence
from harness.engine.strategy import Prediction
from harness.memory.tiers import PAGEABLE, PINNED
from strategies.common.workload_shape import WorkloadShape
from strategies.offloading.batches_in_flight import like_shares
from strategies.offloading.planning.cost import CostModel, Overlap
from strategies.offloading.planning.memory import (
    KV_CACHE,
    Deployment,
    Storage,
    Switches,
    WeightSizes,
    held_bytes,
    kv_staging_bytes,
    micro_batch_kv_tokens,
    pool_sizes,
)
from strategies.offloading.planning.micro_batch_memory import MicroBatchMemory
from strategies.offloading.planning.policy import GivenPolicy, Policy
from strategies.offloading.planning.prediction import predict
from strategies.offloading.planning.rate_probe import RateProbe
from strategies.offloading.planning.search import better_policy, faster_of, nothing_fits
from strategies.offloading.planning.task import Search

_MARGIN = 1e-9  # a resident expert must not be lost to the last bit of its share


@dataclass(frozen=True, kw_only=True)
class OffloadPlan:
    """A policy with the deployment and the rates that it was chosen for."""

    policy: Policy
    cost: CostModel

    @property
    def deployment(self) -> Deployment:
        return self.cost.deployment

    @property
    def memory(self) -> MicroBatchMemory:
        """The memory that a micro-batched pipeline reserves, as the search has counted it."""
        size = self.policy.micro_batch_size
        staged = kv_staging_bytes(self.deployment, size) if self.policy.gpu_attention else 0
        return MicroBatchMemory(
            pool=pool_sizes(self.deployment, self.policy),
            prompt_tokens=ceil(self.deployment.shape.prompts_of(size) + self.deployment.shape.longest_prompt),
            cached_tokens=ceil(micro_batch_kv_tokens(self.deployment.shape, size)),
            kv_staging_bytes=staged,
            kv_relay_bytes=staged if self.deployment.storage.relays_kv else 0,
        )

    @property
    def device_kv_bytes(self) -> int:
        """The bytes of the batch's KV cache that lie on the device."""
        return held_bytes(self.deployment, self.policy)["device"][KV_CACHE]

    @property
    def prediction(self) -> Prediction | None:
        """The performance model's prediction for full batches and one with the rest; None where nothing can run."""
        return self.predicted(None)

    def predicted(self, batches: Iterable[int] | None) -> Prediction | None:
        """Return the performance model's prediction for batches of so many requests; None where nothing can run."""
        return predict(self.cost, self.policy, batches) if self.deployment.shape.num_requests else None

    def as_record(self) -> dict[str, Any]:
        """Return the policy, the rates, and the seconds that each resource is busy with a layer of a decode step."""
        times = self.cost.decode(Switches.of(self.policy))
        busy = {f"layer_{name.replace(' ', '_')}_s": s for name, s in times.by_resource(self.policy).items()}
        return {
            **self.policy.as_record(),
            "num_micro_batches": self.policy.num_micro_batches,
            **busy,
            "bottleneck": times.bottleneck(self.policy),
            "rates": asdict(self.cost.rates),
        }


def plan_policy(
    engine: Engine,
    given: GivenPolicy,
    *,
    packet_bytes: int,
    padded: bool = False,
    min_micro_batches: int = 1,
    max_micro_batches: int | None = None,
    overlap: Overlap = "all",
    extended: bool = True,
    stages: bool = False,
    relays_kv: bool = False,
) -> OffloadPlan:
    """Return the best policy for the engine's model, requests, machine and KV cache.

    With `stages` each GPU has some of the layers, and a batch of its own in flight. Without `extended` the model is Eq.
    12-14 as printed. With `padded` prompts will be padded to the longest of their batch, so all are planned for as long
    as the longest. With `relays_kv` the cache goes to the device by staging copies. Hidden states of a prefill wait on
    the device or in pinned memory, whichever allows the better policy. Where a given micro-batch's prompts fit neither
    way, it is prefilled in parts; where a given batch is larger than the workload and does not fit, it is as large as
    the workload. Raises ConfigError naming the memory that is too small.
    """
    deployment = deployment_of(engine, padded=padded, num_stages=len(engine.ranks) if stages else 1)
    shares_layers = deployment.blocks_in_flight < deployment.num_gpus
    cpu_ffn = given.gpu_ffn is not True
    probe = RateProbe(
        engine, packet_bytes=packet_bytes, shares_layers=shares_layers, cpu_ffn=cpu_ffn, extended=extended
    )
    cost = CostModel(deployment=deployment, rates=probe.measure(), overlap=overlap)
    wanted = Search(cost=cost, given=given, min_micro_batches=min_micro_batches, max_micro_batches=max_micro_batches)
    for task in _alternatives(_with_storage(wanted, relays_kv=relays_kv)):
        on_device, waiting = (_with_storage(task, prefill_hidden_tier=tier) for tier in ("device", PINNED))
        if (found := faster_of(on_device, waiting)) is not None:
            best = OffloadPlan(policy=found[1], cost=found[0].cost)
            chosen = max([best, *_without_rest(found[0], best)], key=_predicted_tok_s)
            return _with_sized_rates(chosen, probe) if extended and deployment.shape.num_requests else chosen
    raise nothing_fits(waiting)


def _with_sized_rates(plan: OffloadPlan, probe: RateProbe) -> OffloadPlan:
    """Return the plan with the rates that the GPU reaches at its policy's sizes, for its prediction. To measure these
    for each policy of a search would take too long."""
    deployment, size = plan.deployment, plan.policy.micro_batch_size
    prompts = Shape.of_prompts(ceil(deployment.prefill_tokens(size)), ceil(deployment.shape.prompt_tokens))
    rates = probe.at_sizes(plan.cost.rates, decode_tokens=size, prompts=prompts)
    return replace(plan, cost=replace(plan.cost, rates=rates))


def _alternatives(wanted: Search) -> Iterator[Search]:
    """Yield the wanted search, then it with prefills in parts, then both with room for no more than the workload."""
    tasks = [wanted]
    if (wanted.given.batch_size or 0) > wanted.whole_workload:
        tasks.append(replace(wanted, given=replace(wanted.given, batch_size=wanted.whole_workload)))
    for task in tasks:
        for limit in _prefill_limits(task.deployment, task.given):
            yield _with_storage(task, prefill_limit_tokens=limit)


def _with_storage(task: Search, **changes: Any) -> Search:
    deployment = task.deployment
    changed = replace(deployment, storage=replace(deployment.storage, **changes))
    return replace(task, cost=replace(task.cost, deployment=changed))


def _without_rest(task: Search, best: OffloadPlan) -> Iterator[OffloadPlan]:
    """Yield the best policy with one batch fewer for the workload, each as large as the others.

    The fastest layer may leave a last batch of a few sequences, which needs all weights as well. Yields nothing where
    that does not fit, or where the batch size is given.
    """
    num_requests = best.deployment.shape.num_requests
    num_whole = num_requests // best.policy.batch_size
    if task.given.batch_size is None and num_whole and num_requests % best.policy.batch_size:
        given = replace(task.given, batch_size=ceil(num_requests / num_whole))
        policy = better_policy(replace(task, given=given), 0.0)
        if policy is not None:
            yield OffloadPlan(policy=policy, cost=best.cost)


def _predicted_tok_s(plan: OffloadPlan) -> float:
    return plan.prediction.throughput_tok_s if plan.prediction is not None else 0.0


def deployment_of(engine: Engine, *, padded: bool = False, num_stages: int = 1) -> Deployment:
    """Describe what the engine has loaded. Requests that fit no KV cache are left out: they will be rejected."""
    blocks, tiers = engine.kv.allocator, engine.machine.tiers
    sizes = WeightSizes.of_store(engine.store, num_stages=num_stages)
    step = sizes.experts_bytes / max(engine.spec.num_experts, 1) / sizes.layer_bytes
    sharing = engine.ranks if num_stages == 1 else engine.ranks[:1]
    kv_bytes_per_token = sum(each.spec.kv_bytes_per_token for each in sharing)
    fitting = [s for s in engine.sequences if blocks.blocks_for(s.max_tokens) <= blocks.num_blocks // num_stages]
    storage = Storage(
        weights_tier=PAGEABLE if engine.store.is_pageable else PINNED,
        kv_cache_bytes=blocks.num_blocks * blocks.block_size * kv_bytes_per_token,
        resident_step=step * (1 + _MARGIN),
    )
    return Deployment(
        spec=engine.spec,
        sizes=sizes,
        shape=_shape(fitting, blocks.block_size, padded=padded, num_stages=num_stages),
        capacities_bytes={name: tier.capacity_bytes for name, tier in tiers.items()},
        storage=storage,
        num_gpus=len(engine.ranks),
        blocks_in_flight=num_stages,
        kernels=engine.machine.gpu_kernels,
        padded=padded,
        num_requests=len(fitting),
    )


def _shape(fitting: list[Sequence], block_size: int, *, padded: bool, num_stages: int) -> WorkloadShape:
    """Return the shape of all requests together, or of the largest share where several batches in flight share them."""
    if fitting:
        share = like_shares(fitting, num_stages)[0]
        return WorkloadShape.of_sequences(share, block_tokens=block_size, padded=padded)
    return WorkloadShape.of_lengths(1, 1, longest_prompt=1, num_requests=0, block_tokens=block_size)


def _prefill_limits(deployment: Deployment, given: GivenPolicy) -> Iterator[int | None]:
    """Yield the limits to try for a prefill's tokens, None first. A free micro-batch size adapts by itself."""
    yield None
    if given.micro_batch_size is not None:
        limit, longest = ceil(deployment.shape.prompts_of(given.micro_batch_size)), deployment.shape.longest_prompt
        while limit > longest:
            limit = max(limit // 2, longest)
            yield limit
