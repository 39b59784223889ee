"""Count what an offloading policy holds in each memory tier, by name (the constraints of MoE-Lightning §4.2).
Torch-free.

The terms are written once, in the policy's unknowns: `demands` gives rows to the policy search, and `held_bytes` gives
bytes to planners, figures and the code that reserves them. Buffers are taken once for a whole run: one that serves both
phases is as large as the phase that needs more of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

from harness.engine.activation_pool import PoolSizes
from harness.engine.activations import (
    TABLE_ENTRY_BYTES,
    attention_bytes,
    expert_bytes,
    host_attention_bytes,
    host_expert_bytes,
    state_bytes,
)
from harness.machine.base import GpuKernels
from harness.memory.tiers import PAGEABLE, PINNED, RAM
from harness.model.spec import ModelSpec
from strategies.common.workload_shape import WorkloadShape
from strategies.offloading.planning.linear_terms import BATCH, DEVICE_SEQUENCES, RESIDENT_WEIGHTS, Linear
from strategies.offloading.planning.policy import Policy

if TYPE_CHECKING:
    from harness.memory.weights import WeightStore

KV_CACHE = "kv cache"  # stands for a tier where the size of the host cache is given
_SLACK_BYTES = 1 << 16  # a tier's: alignment of buffers, and of the pages that a layer is cut into
_LAYERS_BUFFERED = 2  # on the device, and where weights are staged in pinned memory too (§A.1)
_IN_RAM = (PINNED, PAGEABLE)
_IN_ATTENTION = 4  # decode micro-batches between QKV and output projection: one each side, two ahead on the CPU


@dataclass(frozen=True, kw_only=True)
class WeightSizes:
    """The bytes of the weights as stored."""

    layer_bytes: int  # of the largest layer
    experts_bytes: int  # of its experts
    layers_bytes: int  # of all layers
    all_experts_bytes: int  # of all layers' experts
    ends_bytes: int  # embedding and head, which stay on the device
    device_ends_bytes: int  # of them on one device

    @classmethod
    def of_spec(cls, spec: ModelSpec) -> WeightSizes:
        expert = spec.components["expert"]
        ends_bytes = sum(spec.components[name].total_bytes for name in ("embedding", "head", "final_norm"))
        return cls(
            layer_bytes=spec.layer_bytes,
            experts_bytes=spec.num_experts * expert.nbytes,
            layers_bytes=spec.model_bytes - ends_bytes,
            all_experts_bytes=expert.total_bytes,
            ends_bytes=ends_bytes,
            device_ends_bytes=ends_bytes,
        )

    @classmethod
    def of_store(cls, store: WeightStore, *, num_stages: int = 1) -> WeightSizes:
        """Return the sizes as laid out in the host's memory, alignment included; with several stages, those of one."""

        experts = {part.layout.name for layer in range(len(store.layers)) for part in store.experts(layer).values()}

        def experts_in(sizes: Mapping[str, int]) -> int:
            return sum(size for name, size in sizes.items() if name in experts)

        layers = [{name: part.layout.nbytes for name, part in parts.items()} for parts in store.layers]
        ends, size = (store.embedding.layout.nbytes, store.head.layout.nbytes), len(layers) // num_stages

        def largest_stage(by_layer: list[int]) -> int:
            return max(sum(by_layer[start : start + size]) for start in range(0, len(by_layer), size))

        return cls(
            layer_bytes=store.layer_bytes,
            experts_bytes=experts_in(store.slot_bytes),
            layers_bytes=largest_stage([sum(sizes.values()) for sizes in layers]),
            all_experts_bytes=largest_stage([experts_in(sizes) for sizes in layers]),
            ends_bytes=sum(ends),
            device_ends_bytes=sum(ends) if num_stages == 1 else max(ends),
        )


@dataclass(frozen=True, kw_only=True)
class Storage:
    """The storage that a pipeline chooses; it is part of the system, not of the policy."""

    weights_tier: str = PAGEABLE  # staged through pinned memory (§A.1), or pinned: read by the link directly
    prefill_hidden_tier: str = "device"  # where hidden states of all micro-batches wait between two layers, or pinned
    prefill_buffers: int = 2  # micro-batches that have buffers for attention at the same time in prefill
    kv_cache_bytes: int | None = None  # size of the host cache, where it is given; null: as large as the policy needs
    relays_kv: bool = False  # where the GPU attends, the cache goes there by staging copies, like pageable weights
    resident_step: float | None = None  # r_w comes in multiples of this share (of an expert); null: any
    prefill_limit_tokens: int | None = None  # of a micro-batch; where its prompts are more, it is prefilled in parts


@dataclass(frozen=True, kw_only=True)
class Switches:
    """The part of a policy that is not linear: for each value, memory and time are linear in the rest."""

    micro_batch_size: int  # mu
    gpu_attention: bool  # A_g
    gpu_ffn: bool  # F_g

    @classmethod
    def of(cls, policy: Policy) -> Switches:
        return cls(micro_batch_size=policy.micro_batch_size, gpu_attention=policy.gpu_attention, gpu_ffn=policy.gpu_ffn)


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """A model and a workload on a machine: everything about memory but the policy.

    Where several GPUs share every layer, `spec` and `sizes` are one GPU's share, with the ends, which the first GPU
    has. Where GPUs are stages of a pipeline, `sizes` are those of one stage, and as many batches as stages are in
    flight: each is as large as the policy says, and has its share of the workload. What the host holds is for all of
    them together.
    """

    spec: ModelSpec
    sizes: WeightSizes
    shape: WorkloadShape
    capacities_bytes: Mapping[str, int]  # by tier; those that are missing hold anything
    storage: Storage = Storage()
    num_gpus: int = 1
    blocks_in_flight: int = 1  # 1 or num_gpus
    kernels: GpuKernels = None  # of the machine
    padded: bool = False  # prompts
    num_requests: int | None = None  # of all batches in flight; null: each has as many as `shape` says

    @property
    def limits_bytes(self) -> dict[str, int]:
        """The capacity of each tier, and that of the host's KV cache where it is given."""
        given = self.storage.kv_cache_bytes
        return {**self.capacities_bytes, **({} if given is None else {KV_CACHE: given})}

    def prefill_tokens(self, micro_batch_size: int) -> float:
        """Return the tokens that go through a layer together in prefill."""
        limit = self.storage.prefill_limit_tokens
        wanted = self.shape.prompts_of(micro_batch_size)
        return wanted if limit is None else max(min(wanted, limit), self.shape.longest_prompt)


def demands(deployment: Deployment, switches: Switches) -> dict[str, dict[str, Linear]]:
    """Return the bytes by tier and name. Where the host cache's size is given, the tier "kv cache" has what is kept in
    it.

    Prefill runs on the device whatever F_g says, out of buffers for whole layers. With F_g = 0 decode has buffers of
    its own, for everything but the experts; r_w is a share of that, for decode alone.
    """
    sizes, storage = deployment.sizes, deployment.storage
    num_gpus = deployment.num_gpus
    kv_bytes = (BATCH - DEVICE_SEQUENCES) * (num_gpus * kv_bytes_per_sequence(deployment))
    given = storage.kv_cache_bytes
    tiers: dict[str, dict[str, Linear]] = {
        "device": _on_device(deployment, switches),
        PINNED: _in_pinned(deployment, switches) | {KV_CACHE: kv_bytes if given is None else Linear(given)},
        PAGEABLE: {},
    }
    tiers[storage.weights_tier]["weights"] = Linear(num_gpus * sizes.layers_bytes + sizes.ends_bytes)
    tiers[RAM] = {name: nbytes for tier in _IN_RAM for name, nbytes in tiers[tier].items()}
    if given is not None:
        tiers[KV_CACHE] = {KV_CACHE: kv_bytes}
    return tiers


def streamed_bytes(sizes: WeightSizes, *, gpu_ffn: bool, prefill: bool = False) -> Linear:
    """Return the bytes of a layer that have to be brought to the device for a pass.

    These are the weights that are not resident there. Of a layer whose experts the CPU has in decode, prefill needs all
    weights.
    """
    if gpu_ffn:
        return sizes.layer_bytes * (1 - RESIDENT_WEIGHTS)
    return Linear(sizes.layer_bytes) if prefill else (sizes.layer_bytes - sizes.experts_bytes) * (1 - RESIDENT_WEIGHTS)


def buffered_bytes(sizes: WeightSizes, *, gpu_ffn: bool) -> Linear:
    """Return the bytes that buffer two layers of each stream of weights."""
    prefill = streamed_bytes(sizes, gpu_ffn=gpu_ffn, prefill=True)
    return _LAYERS_BUFFERED * (prefill if gpu_ffn else prefill + streamed_bytes(sizes, gpu_ffn=False))


def kv_bytes_per_sequence(deployment: Deployment) -> float:
    """Return the KV cache's bytes at a sequence's end, over all layers, for the heads of each GPU."""
    return deployment.shape.kv_tokens * deployment.spec.kv_bytes_per_token


def pool_tokens(deployment: Deployment, switches: Switches) -> dict[str, Linear]:
    """Return the fields of `PoolSizes`.

    A pass of prompts may have one micro-batch's tokens more than N mean prompts, since requests do not divide evenly.
    """
    shape, storage, mu = deployment.shape, deployment.storage, switches.micro_batch_size
    largest = max(ceil(deployment.prefill_tokens(mu)), mu)
    in_pass = BATCH * max(shape.prompt_tokens, 1.0) + largest
    is_kept = storage.prefill_hidden_tier == PINNED
    return {
        "in_pass": in_pass,
        "largest": Linear(largest),
        "in_attention": Linear(max(storage.prefill_buffers * largest, _IN_ATTENTION * mu)),
        "hidden": BATCH + storage.prefill_buffers * largest if is_kept else in_pass,
        "kept": in_pass if is_kept else Linear(),
        "host_experts": Linear() if switches.gpu_ffn else BATCH,
    }


def pool_sizes(deployment: Deployment, policy: Policy) -> PoolSizes:
    """Return the sizes of the activations to reserve for a policy."""
    tokens = pool_tokens(deployment, Switches.of(policy))
    sizes = {name: ceil(term.at(policy)) for name, term in tokens.items()}
    return PoolSizes(**sizes, passes=deployment.blocks_in_flight, padded=deployment.padded)


def _on_device(deployment: Deployment, switches: Switches) -> dict[str, Linear]:
    spec, sizes = deployment.spec, deployment.sizes
    tokens, state = pool_tokens(deployment, switches), dict(state_bytes(spec))
    behind = expert_bytes(spec, deployment.kernels, padded=deployment.padded)
    resident = sizes.layers_bytes - (0 if switches.gpu_ffn else sizes.all_experts_bytes)
    held = {
        "embedding and head": Linear(sizes.device_ends_bytes),
        "resident weights": resident * RESIDENT_WEIGHTS,
        "weight buffer": buffered_bytes(sizes, gpu_ffn=switches.gpu_ffn),
        "hidden states": deployment.blocks_in_flight * tokens["hidden"] * state.pop("hidden"),
        "token ids": deployment.blocks_in_flight * tokens["in_pass"] * sum(state.values()),
        "around attention": tokens["in_attention"] * sum(attention_bytes(spec).values()),
        "experts' input and output": tokens["largest"] * sum(behind.values()),
        KV_CACHE: DEVICE_SEQUENCES * kv_bytes_per_sequence(deployment),
        "block tables": DEVICE_SEQUENCES * (deployment.shape.kv_tokens * TABLE_ENTRY_BYTES),  # a block has >= 1 token
        "slack": Linear(_SLACK_BYTES),
    }
    if switches.gpu_attention:  # the next micro-batch's KV of a layer comes while this one's is read
        held["kv staging"] = Linear(2 * kv_staging_bytes(deployment, switches.micro_batch_size))
    return held


def kv_staging_bytes(deployment: Deployment, micro_batch_size: int) -> int:
    """Return the bytes of one layer's keys and values of a micro-batch."""
    return ceil(micro_batch_kv_tokens(deployment.shape, micro_batch_size) * deployment.spec.kv_bytes_per_token_layer)


def micro_batch_kv_tokens(shape: WorkloadShape, micro_batch_size: int) -> float:
    """Return Algorithm 2's cache_size: mu sequences of mean length at their end, and one of the longest.

    The micro-batch that gets a request is the lightest, hence at most an average one, so no request is left over
    because of its length.
    """
    return micro_batch_size * shape.kv_tokens + shape.longest_kv_tokens


def _in_pinned(deployment: Deployment, switches: Switches) -> dict[str, Linear]:
    """Return the bytes in pinned memory by name. GPUs that share a layer have the same hidden states, kept once."""
    spec, tokens, num_gpus = deployment.spec, pool_tokens(deployment, switches), deployment.num_gpus
    held = {
        "host rows": num_gpus * (tokens["in_attention"] * sum(host_attention_bytes(spec).values())),
        "kept hidden states": deployment.blocks_in_flight * tokens["kept"] * state_bytes(spec)["hidden"],
        "experts' rows": num_gpus * tokens["host_experts"] * sum(host_expert_bytes(spec).values()),
        "pinned slack": Linear(_SLACK_BYTES),
    }
    if deployment.storage.relays_kv and switches.gpu_attention:
        held["kv relay"] = Linear(num_gpus * 2 * kv_staging_bytes(deployment, switches.micro_batch_size))
    if deployment.storage.weights_tier == PAGEABLE:
        held["weight staging"] = num_gpus * buffered_bytes(deployment.sizes, gpu_ffn=switches.gpu_ffn)
    return held


def held_bytes(deployment: Deployment, policy: Policy) -> dict[str, dict[str, int]]:
    """Return the bytes that a policy holds, by tier and name."""
    tiers = demands(deployment, Switches.of(policy))
    return {tier: {name: ceil(term.at(policy)) for name, term in pools.items()} for tier, pools in tiers.items()}


def shortfalls(deployment: Deployment, policy: Policy) -> dict[str, int]:
    """Return the bytes that each tier lacks; empty where everything fits.

    Sums are rounded up, not their terms: these together may be some bytes more than the search has counted. A tier's
    slack has room for whole bytes.
    """
    limits, tiers = deployment.limits_bytes, demands(deployment, Switches.of(policy))
    held = {tier: ceil(sum(term.at(policy) for term in pools.values())) for tier, pools in tiers.items()}
    return {tier: nbytes - limits[tier] for tier, nbytes in held.items() if tier in limits and nbytes > limits[tier]}


def fits(deployment: Deployment, policy: Policy) -> bool:
    """Tell whether every tier holds what the policy keeps there."""
    return not shortfalls(deployment, policy)
