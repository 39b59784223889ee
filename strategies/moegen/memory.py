"""Count what a policy of MoE-Gen holds in device and pinned memory: the terms of Eq. 2 and 3. Torch-free.

The terms are written once, as buffers with their sizes: the planner adds them up, and the pipeline reserves them. What
lives during one phase only (S_IS and S_KV-GPU) shares its device memory with that of the other phase.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

from harness.engine.activations import (
    attention_bytes,
    expert_row_bytes,
    host_attention_bytes,
    state_bytes,
)
from harness.engine.temporaries import dense_workspace_bytes, expert_workspace_bytes, head_workspace_bytes
from harness.machine.base import GpuKernels
from harness.model.spec import ModelSpec
from strategies.common.workload_shape import WorkloadShape
from strategies.moegen.policy import PhasePolicy, Policy

ALIGNMENT_BYTES = 256  # of each buffer within a phase's memory
NUM_STAGINGS = 2  # of keys and values, and of an expert's slices: one is filled while the other one is used
NUM_TURNS = {True: 2, False: 3}  # sets of buffers that micro-batches take in turns; more where rows come and go too


@dataclass(frozen=True, kw_only=True)
class Temporaries:
    """The most bytes of temporaries that ops took for a row, as the device has told; 0 where it tells nothing. What is
    counted for them holds where that is more. The head is not among them: it takes what room there is."""

    of_experts: int = 0
    of_others: int = 0


NONE_MEASURED = Temporaries()


@dataclass(frozen=True, kw_only=True)
class PhaseSizes:
    """The buffers of a phase have these sizes, in rows. A row is a token; in decode also a sequence."""

    rows: int  # of the accumulated batch
    micro_batch_rows: int  # of the largest micro-batch
    cpu_rows: int  # of all micro-batches for which the CPU attends
    slice_rows: int  # b_e
    kv_tokens: int  # of a KV staging buffer; 0 where none is needed
    on_device: bool

    def device(self, spec: ModelSpec) -> dict[str, int]:
        """Return the bytes of each device buffer by name, those behind `/` for each turn: S_IS and S_KV-GPU."""
        whole = {**state_bytes(spec), **expert_row_bytes(spec)}
        turns = range(NUM_TURNS[self.on_device])
        sizes = {name: self.rows * nbytes for name, nbytes in whole.items()} if self.on_device else {}
        turned = dict(attention_bytes(spec)) if self.on_device else {**attention_bytes(spec), **whole}
        sizes |= {f"{name}/{turn}": self.micro_batch_rows * nbytes for turn in turns for name, nbytes in turned.items()}
        for turn in range(NUM_STAGINGS):
            sizes[f"kv/{turn}"] = self.kv_tokens * spec.kv_bytes_per_token_layer
            if not self.on_device:
                sizes[f"expert rows/{turn}"] = self.slice_rows * spec.hidden_dim * spec.dtype_bytes
                sizes[f"expert results/{turn}"] = self.slice_rows * spec.hidden_dim * 4
        return {name: nbytes for name, nbytes in sizes.items() if nbytes}

    def workspace_bytes(
        self, spec: ModelSpec, measured: Temporaries = NONE_MEASURED, kernels: GpuKernels = None
    ) -> int:
        """Return the bytes of temporaries inside ops, of which one runs at a time. `kernels` are the machine's."""
        attention = self.micro_batch_rows * max(dense_workspace_bytes(spec, kernels, padded=True), measured.of_others)
        experts = self.slice_rows * max(expert_workspace_bytes(spec, kernels), measured.of_experts)
        return max(attention, experts, head_workspace_bytes(spec))

    def pinned(self, spec: ModelSpec) -> dict[str, int]:
        """Return the bytes of each pinned buffer by name; keys are as in `device`."""
        rows = host_attention_bytes(spec)
        sizes = {name: self.cpu_rows * nbytes for name, nbytes in rows.items()}
        for turn in range(NUM_TURNS[self.on_device]):
            for name in moved_to_host(spec):
                sizes[f"{name}/{turn}"] = self.micro_batch_rows * rows[name]
        if not self.on_device:
            row_bytes, sum_bytes = spec.hidden_dim * spec.dtype_bytes, spec.hidden_dim * 4
            sizes |= {
                "kept hidden": self.rows * row_bytes,
                "rows": self.rows * row_bytes,
                "sums": self.rows * sum_bytes,
            }
            for turn in range(NUM_STAGINGS):
                sizes[f"rows to load/{turn}"] = self.slice_rows * row_bytes
                sizes[f"results to add/{turn}"] = self.slice_rows * sum_bytes
        return {name: nbytes for name, nbytes in sizes.items() if nbytes}

    def device_bytes(self, spec: ModelSpec) -> int:
        return sum(map(aligned, self.device(spec).values()))

    def pinned_bytes(self, spec: ModelSpec) -> int:
        return sum(map(aligned, self.pinned(spec).values()))


def moved_to_host(spec: ModelSpec) -> list[str]:
    """Return the names of pinned buffers that a micro-batch needs even where the GPU attends: what is cached."""
    return [f"host_{piece.name}" for piece in spec.kv_pieces]


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def prefill_sizes(policy: PhasePolicy, shape: WorkloadShape) -> PhaseSizes:
    """Return the sizes for prompts of mean length, with room for the longest one."""
    micro_batch_rows = ceil(shape.prompts_of(policy.attention_batch))
    rows = max(ceil(shape.prompts_of(policy.batch_size)), micro_batch_rows)
    return PhaseSizes(
        rows=rows,
        micro_batch_rows=micro_batch_rows,
        cpu_rows=0,
        slice_rows=min(policy.expert_batch, rows),
        kv_tokens=0,
        on_device=policy.on_device,
    )


def decode_sizes(policy: PhasePolicy, shape: WorkloadShape) -> PhaseSizes:
    """Return the sizes for a batch that is cut into micro-batches of at most b_a, apart for CPU and GPU. However it is
    cut, their rows lie one behind another."""
    size = policy.attention_batch
    kv_tokens = ceil(max(size * shape.kv_tokens, shape.longest_kv_tokens)) if policy.cpu_attention < 1 else 0
    return PhaseSizes(
        rows=policy.batch_size,
        micro_batch_rows=size,
        cpu_rows=policy.num_on_cpu(policy.batch_size),
        slice_rows=min(policy.expert_batch, policy.batch_size),
        kv_tokens=kv_tokens,
        on_device=policy.on_device,
    )


def phases(policy: Policy, shape: WorkloadShape) -> tuple[PhaseSizes, PhaseSizes]:
    """Return the sizes of prefill and of decode."""
    return prefill_sizes(policy.prefill, shape), decode_sizes(policy.decode, shape)


@dataclass(frozen=True, kw_only=True)
class WeightSizes:
    """The bytes of slots, and how many experts there are to keep."""

    expert_bytes: int  # of the largest expert
    dense_bytes: int  # of a slot for a layer without its experts
    num_experts: int  # of all layers

    def device(self, policy: Policy) -> dict[str, int]:
        """Return the bytes of S_Params, S_Expert and S_Dense by name."""
        return {
            "resident experts": policy.resident_experts * self.expert_bytes,
            "expert slots": policy.expert_slots * self.expert_bytes,
            "dense slots": policy.dense_slots * self.dense_bytes,
        }


def held_bytes(
    policy: Policy,
    spec: ModelSpec,
    shape: WorkloadShape,
    weights: WeightSizes,
    measured: Temporaries = NONE_MEASURED,
    kernels: GpuKernels = None,
) -> Mapping[str, dict[str, int]]:
    """Return what the policy adds to each tier, by name: Eq. 3 on the device, and in pinned memory what Eq. 2 leaves
    out."""
    both = phases(policy, shape)
    device = weights.device(policy)
    device["intermediate states and staged keys and values"] = max(each.device_bytes(spec) for each in both)
    device["temporaries"] = max(each.workspace_bytes(spec, measured, kernels) for each in both)
    pinned = {"rows of micro-batches and accumulated tokens": max(each.pinned_bytes(spec) for each in both)}
    return {"device": device, "pinned": pinned}
