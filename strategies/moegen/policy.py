"""The policy of MoE-Gen: the variables of its search (Table 2), for prefill and decode apart. Torch-free.

`ModuleBatching(engine, policy, shape, packet_bytes=...)` in `pipeline.py` runs a policy; `shape` is the workload's.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from harness.config import config, require


@dataclass(frozen=True, kw_only=True)
class PhasePolicy:
    """A phase, prefill or decode, has batches of these sizes. `on_device` tells where the tokens of a batch accumulate:
    in device memory, or else in pinned memory."""

    batch_size: int  # B: sequences whose tokens accumulate
    attention_batch: int  # b_a: sequences of a micro-batch through attention
    expert_batch: int  # b_e: tokens of a slice through an expert
    cpu_attention: float = 0.0  # omega: share of the sequences for which the CPU attends; decode only
    on_device: bool = True

    def num_on_cpu(self, num_sequences: int) -> int:
        """Return for how many of so many sequences the CPU attends."""
        return round(self.cpu_attention * num_sequences)


@dataclass(frozen=True, kw_only=True)
class Policy:
    """A policy with the device memory for weights, which both phases share.

    `expert_slots` is S_Expert in experts, `dense_slots` is S_Dense in layers without their experts, and
    `resident_experts` is S_Params in experts. As many `dense_slots` as layers keep these parts on the device. Without
    `prefetch` an expert is brought when the router has chosen it, whatever the batch.
    """

    prefill: PhasePolicy
    decode: PhasePolicy
    expert_slots: int
    dense_slots: int = 1
    resident_experts: int = 0
    prefetch: bool = True

    def of_at_most(self, batch_size: int) -> Policy:
        """Return the policy with batches of at most so many sequences in both phases."""

        def smaller(phase: PhasePolicy) -> PhasePolicy:
            sizes = {name: min(getattr(phase, name), batch_size) for name in ("batch_size", "attention_batch")}
            return replace(phase, **sizes)

        return replace(self, prefill=smaller(self.prefill), decode=smaller(self.decode))

    def as_record(self) -> dict[str, Any]:
        """Return all fields by their names in the configuration; those of prefill begin with `prefill_`."""
        record = asdict(self)
        prefill, decode = record.pop("prefill"), record.pop("decode")
        del prefill["cpu_attention"]
        return decode | {f"prefill_{name}": value for name, value in prefill.items()} | record


@config
class GivenPolicy:
    """The parts of a policy that a configuration fixes; null: the search decides. The first four are those of decode;
    `on_device` is for both phases. `batch_size` is not searched: null is the most that Eq. 2 allows, of the workload's
    requests."""

    batch_size: int | None = None
    attention_batch: int | None = None
    expert_batch: int | None = None
    cpu_attention: float | None = None
    prefill_batch_size: int | None = None
    prefill_attention_batch: int | None = None
    prefill_expert_batch: int | None = None
    on_device: bool | None = None
    expert_slots: int | None = None
    dense_slots: int | None = None
    resident_experts: int | None = None

    def __post_init__(self) -> None:
        for name, value in self.sizes.items():
            least = 0 if name == "resident_experts" else 1
            require(value >= least, name, f"must be at least {least} or null, got {value}")
        share = self.cpu_attention
        valid = share is None or 0.0 <= share <= 1.0
        require(valid, "cpu_attention", f"must lie between 0 and 1 or be null, got {share}")

    @property
    def sizes(self) -> dict[str, int]:
        """Return the sizes that are given, by name: all that is counted in sequences, tokens, experts or layers."""
        others = ("cpu_attention", "on_device")
        return {name: value for name, value in asdict(self).items() if name not in others and value is not None}
