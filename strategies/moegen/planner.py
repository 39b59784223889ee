"""Complete a policy by what fits in memory.

`complete_by_memory` knows no rates: it takes the largest decode batch (§4.3), a prefill large enough to hide the
transfer of experts, micro-batches and slices of usual sizes, halved until Eq. 3 holds, and keeps experts on the device
with what is left.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import ceil

from harness.config import ConfigError
from harness.engine.engine import Engine
from harness.engine.limits import SLACK_BYTES
from harness.machine.base import GpuKernels
from harness.memory.expert_slots import expert_slot_bytes
from harness.memory.tiers import DEVICE, PINNED, RAM, Tier, enough, told_bytes
from harness.memory.weights import slot_sizes
from harness.model.spec import ModelSpec
from strategies.common.workload_shape import WorkloadShape
from strategies.moegen.memory import NONE_MEASURED, Temporaries, WeightSizes, held_bytes
from strategies.moegen.policy import GivenPolicy, PhasePolicy, Policy

_ATTENTION_TOKENS = 1 << 13  # of a micro-batch in prefill, before memory is looked at
_ATTENTION_BATCH = 1 << 8  # of decode
_EXPERT_TOKENS = 1 << 12
_HIDING_TOKENS = 1 << 11  # of an expert hide the transfer of the next one (Fig. 3: A5000, 32 GB/s)
_CPU_ATTENTION = 0.6  # omega where the CPU attends to keys and values (Table 10: C1, C2); 0 where it would to latents
_HALVINGS = 3  # of a size, before tokens accumulate elsewhere
_SIZES = (  # phase, name and setting of the sizes that are halved
    ("prefill", "attention_batch", "prefill_attention_batch"),
    ("prefill", "expert_batch", "prefill_expert_batch"),
    ("decode", "attention_batch", "attention_batch"),
    ("decode", "expert_batch", "expert_batch"),
)
_SLOTS_SHARE = 0.25  # of the device memory, for the slots of prefetched experts beyond the first two


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """A model, a workload and the memory that they leave: all that a policy is chosen for."""

    spec: ModelSpec
    shape: WorkloadShape
    weights: WeightSizes
    free_bytes: Mapping[str, int]  # by tier, beside weights, KV cache and what stays on the device in any case
    limits: Mapping[str, Tier]  # by tier, what says how much that is
    kv_sequences: int  # that the host's cache holds at their ends: Eq. 2
    temporaries: Temporaries = NONE_MEASURED
    kernels: GpuKernels = None  # of the machine

    @classmethod
    def of(cls, engine: Engine, *, padded: bool = False) -> Deployment:
        """Describe what the engine has loaded. Requests that fit no KV cache are left out: they will be rejected."""
        blocks, store, tiers = engine.kv.allocator, engine.store, engine.machine.tiers
        fitting = [s for s in engine.sequences if blocks.blocks_for(s.max_tokens) <= blocks.num_blocks]
        if fitting:
            shape = WorkloadShape.of_sequences(fitting, block_tokens=blocks.block_size, padded=padded)
        else:
            shape = WorkloadShape.of_lengths(1, 1, longest_prompt=1, num_requests=0, block_tokens=blocks.block_size)
        layers = range(len(store.layers))
        num_experts = sum(len(store.experts(layer)) for layer in layers)
        dense = slot_sizes([part.layout for part in store.dense(layer).values()] for layer in layers)
        return cls(
            spec=engine.spec,
            kernels=engine.machine.gpu_kernels,
            shape=shape,
            weights=WeightSizes(
                expert_bytes=expert_slot_bytes(store) if num_experts else 0,
                dense_bytes=sum(dense.values()),
                num_experts=num_experts,
            ),
            free_bytes={name: tiers[name].free_bytes for name in (DEVICE, PINNED)},
            limits={name: tiers[name].limit for name in (DEVICE, PINNED)},
            kv_sequences=max(1, int(blocks.num_blocks * blocks.block_size // shape.kv_tokens)),
        )

    def held(self, policy: Policy) -> Mapping[str, dict[str, int]]:
        """Return what the policy holds, by tier and name."""
        return held_bytes(policy, self.spec, self.shape, self.weights, self.temporaries, self.kernels)

    def left_bytes(self, policy: Policy) -> dict[str, int]:
        """Return what the policy leaves of each tier; negative where it does not fit."""
        held = self.held(policy)
        return {tier: free - sum(held[tier].values()) - SLACK_BYTES for tier, free in self.free_bytes.items()}

    def fits(self, policy: Policy) -> bool:
        """Tell whether Eq. 2 and 3 hold."""
        return all(left >= 0 for left in self.left_bytes(policy).values())


def complete_by_memory(given: GivenPolicy, deployment: Deployment, *, prefetch: bool = True) -> Policy:
    """Return a policy that has what is given and fits. Raises ConfigError naming a given size without which there is
    one, else the memory that is too small."""
    first = least = _wanted(given, deployment, prefetch=prefetch)
    while True:
        for least in _candidates(given, deployment, first):
            if deployment.fits(least):
                if given.batch_size is not None and least.decode.batch_size < _wanted_batch(given, deployment):
                    raise _too_large("batch_size", given.batch_size)
                return _with_more_experts(given, deployment, least)
        for name, value in given.sizes.items():
            free = replace(given, **{name: None})
            wanted = _wanted(free, deployment, prefetch=prefetch).of_at_most(first.decode.batch_size)
            if name != "batch_size" and any(map(deployment.fits, _candidates(free, deployment, wanted))):
                raise _too_large(name, value)
        if first.decode.batch_size == 1:
            break
        first = first.of_at_most(first.decode.batch_size // 2)
    tier, _ = min(deployment.left_bytes(least).items(), key=lambda item: item[1])
    limit = deployment.limits[tier]
    held = limit.holders() | deployment.held(least)[tier] | {"alignment": SLACK_BYTES}
    raise ConfigError(
        f"hardware.{limit.name}_gb" if limit.name == RAM else f"hardware.{limit.name}_memory_gb",
        f"{limit.capacity_bytes / 1e9:g} GB is too small: {enough(sum(held.values()))} GB are needed "
        f"({told_bytes(held)})",
    )


def _too_large(name: str, value: int) -> ConfigError:
    return ConfigError(f"strategy.policy.{name}", f"must be small enough for the memory, or null, got {value}")


def _candidates(given: GivenPolicy, deployment: Deployment, first: Policy) -> Iterator[Policy]:
    """Yield policies from the one that wants most to the one that wants least. Tokens go elsewhere before sizes become
    very small; at last one of the two slots goes."""
    yield from _smaller(given, deployment, first)
    if given.expert_slots is None and first.expert_slots > 1:
        yield from _smaller(given, deployment, replace(first, expert_slots=1))


def _smaller(given: GivenPolicy, deployment: Deployment, first: Policy) -> Iterator[Policy]:
    """Yield the policy with tokens in other places, and with sizes of micro-batches and slices halved."""
    for most_halvings in (_HALVINGS, 16):
        for policy in _with_places(given, deployment, first):
            yield policy
            for _ in range(most_halvings * len(_SIZES)):
                larger, policy = policy, _halved(given, deployment, policy)
                if policy == larger:
                    break
                yield policy


def _wanted(given: GivenPolicy, deployment: Deployment, *, prefetch: bool) -> Policy:
    """Return the policy with the sizes that are wanted if memory allows."""
    shape, weights = deployment.shape, deployment.weights
    batch_size = _wanted_batch(given, deployment)
    attention_batch = max(1, int(_ATTENTION_TOKENS // shape.prompt_tokens))
    prefill_batch_size = min(
        given.prefill_batch_size or _prefill_batch(given, 2 * hiding_batch(deployment)), batch_size
    )
    cpu_attention = _CPU_ATTENTION if deployment.spec.latent is None else 0.0
    resident = min(given.resident_experts or 0, weights.num_experts)
    prefill = PhasePolicy(
        batch_size=prefill_batch_size,
        attention_batch=min(given.prefill_attention_batch or attention_batch, prefill_batch_size),
        expert_batch=given.prefill_expert_batch or _EXPERT_TOKENS,
    )
    decode = PhasePolicy(
        batch_size=batch_size,
        attention_batch=min(given.attention_batch or _ATTENTION_BATCH, batch_size),
        expert_batch=given.expert_batch or _EXPERT_TOKENS,
        cpu_attention=cpu_attention if given.cpu_attention is None else given.cpu_attention,
    )
    return Policy(
        prefill=prefill,
        decode=decode,
        expert_slots=min(given.expert_slots or 2, max(weights.num_experts - resident, 1)),
        dense_slots=min(given.dense_slots or 1, deployment.spec.num_layers),
        resident_experts=resident,
        prefetch=prefetch,
    )


def _with_places(given: GivenPolicy, deployment: Deployment, policy: Policy) -> Iterator[Policy]:
    """Yield the policy with the places where tokens may accumulate.

    That is on the device; there with a prefill that just hides the transfer of experts; in pinned memory, first of
    prefill and then of decode too.
    """
    prefill, decode = policy.prefill, policy.decode
    if given.on_device is not False:
        yield policy
        if given.prefill_batch_size is None:
            size = min(_prefill_batch(given, hiding_batch(deployment)), prefill.batch_size)
            smaller = replace(prefill, batch_size=size, attention_batch=min(prefill.attention_batch, size))
            yield replace(policy, prefill=smaller)
    if given.on_device is not True:
        on_host = replace(policy, prefill=replace(prefill, on_device=False))
        if given.on_device is None:
            yield on_host
        yield replace(on_host, decode=replace(decode, on_device=False))


def _wanted_batch(given: GivenPolicy, deployment: Deployment) -> int:
    """Return the decode batch: what is given, at most the workload's requests and what Eq. 2 allows."""
    most = max(1, min(deployment.shape.num_requests, deployment.kv_sequences))
    return min(given.batch_size or most, most)


def _prefill_batch(given: GivenPolicy, hiding: float) -> int:
    """Return so many prompts, or one micro-batch of them where its size is given and is more."""
    return max(ceil(hiding), given.prefill_attention_batch or 1)


def hiding_batch(deployment: Deployment) -> float:
    """Return the prompts whose tokens hide the transfer of experts that have equal shares of them."""
    spec = deployment.spec
    tokens = _HIDING_TOKENS * spec.num_experts / max(spec.experts_per_token, 1)
    return max(tokens / deployment.shape.prompt_tokens, 1.0)


def _halved(given: GivenPolicy, deployment: Deployment, policy: Policy) -> Policy:
    """Return the policy with that free size of micro-batches or slices halved which frees most; all of them where none
    does alone."""

    def half(policy: Policy, phase: str, name: str) -> Policy:
        old = getattr(policy, phase)
        return replace(policy, **{phase: replace(old, **{name: max(1, getattr(old, name) // 2)})})

    def held_bytes(policy: Policy) -> int:
        return sum(sum(held.values()) for held in deployment.held(policy).values())

    free = [(phase, name) for phase, name, setting in _SIZES if getattr(given, setting) is None]
    options = [half(policy, *size) for size in free]
    best = min(options, key=held_bytes, default=policy)
    if held_bytes(best) < held_bytes(policy):
        return best
    for size in free:
        policy = half(policy, *size)
    return policy


def _with_more_experts(given: GivenPolicy, deployment: Deployment, policy: Policy) -> Policy:
    """Return the policy with the rest of the device memory given to experts: a share of it to slots, the rest to
    resident ones. Where all of them are resident, so is the rest of the model if it fits."""
    weights, spec = deployment.weights, deployment.spec
    if not weights.num_experts:
        return replace(policy, expert_slots=0)
    left = deployment.left_bytes(policy)[DEVICE]
    streamed = weights.num_experts - policy.resident_experts
    if given.resident_experts is None and streamed <= policy.expert_slots + left // weights.expert_bytes:
        policy = replace(policy, resident_experts=weights.num_experts, expert_slots=0)
        whole = replace(policy, dense_slots=spec.num_layers)
        return whole if given.dense_slots is None and deployment.fits(whole) else policy
    if given.expert_slots is None:
        more = int(_SLOTS_SHARE * left) // weights.expert_bytes
        slots = min(policy.expert_slots + more, max(spec.num_experts, policy.expert_slots), max(streamed, 1))
        left -= (slots - policy.expert_slots) * weights.expert_bytes
        policy = replace(policy, expert_slots=slots)
    if given.resident_experts is None:
        policy = replace(policy, resident_experts=policy.resident_experts + left // weights.expert_bytes)
    return policy
