"""The settings that MoE-Lightning and the other systems in its Figure 6 share (torch-free)."""

from __future__ import annotations

from dataclasses import field
from functools import partial
from typing import ClassVar

from harness.config import config, require
from harness.engine.strategy import Planning, require_packet_mb
from harness.memory.placed import ModelParts
from harness.memory.tiers import PAGEABLE, PINNED
from harness.memory.weights import layer_slots
from harness.model.spec import ModelSpec
from strategies.offloading.planning.policy import GivenPolicy
from strategies.offloading.published.as_built import AsBuilt


@config
class OffloadingConfig:
    """MoE-Lightning and the systems that it is compared with share these settings. What is null is chosen by
    `planning`: as published, or false in `best`."""

    published: ClassVar[AsBuilt | None] = None  # the system as published; None: no planner of its own is

    planning: Planning = "best"
    staging: bool | None = None  # true: pageable -> pinned -> device; false: the whole model lies in pinned memory
    padding: bool | None = None  # true: prompts are padded to the longest of their batch
    packet_mb: float = 1.0
    extended_model: bool = True  # false: Eq. 12-14 as printed, without the extensions of docs/architecture.md
    policy: GivenPolicy = field(default_factory=partial(GivenPolicy, gpu_ffn=True))  # Table 1; null: searched

    def __post_init__(self) -> None:
        require_packet_mb(self.packet_mb)
        told = "must be best: no planner of its own was published with this system"
        require(self.planning == "best" or self.published is not None, "planning", told)

    @property
    def as_built(self) -> AsBuilt | None:
        """The published system where `planning` asks for it."""
        return self.published if self.planning == "as_built" else None

    @property
    def is_staged(self) -> bool:
        default = self.as_built is not None and self.as_built.staging
        return default if self.staging is None else self.staging

    @property
    def is_padded(self) -> bool:
        default = self.as_built is not None and self.as_built.padding
        return default if self.padding is None else self.padding

    @property
    def pin_threads(self) -> int | None:
        """The threads that stage weights in the published system; None: as many as the machine has for that."""
        return self.as_built.pin_threads if self.as_built else None

    def pin_thread_gb_s(self, spec: ModelSpec) -> float | None:
        """Return the rate of one of these threads in the published system; None: that of the profile."""
        return self.as_built.pin_thread_gb_s(spec) if self.as_built else None

    def cpu_attention_times(self, spec: ModelSpec) -> float | None:
        """Return how many times as long the published system attends on the CPU; None where it has our kernel."""
        return self.as_built.cpu_attention_times(spec) if self.as_built else None

    @property
    def is_in_turn(self) -> bool:
        """Tell whether staging copies and the GPU's work take turns, as where one thread does both."""
        return self.as_built is not None and self.as_built.in_turn and self.is_staged

    def least_weight_bytes(self, model: ModelParts) -> dict[str, int]:
        """Return the device memory that weights take, by name: two slots of pages for whole layers. Where decode has a
        stream without experts, it has two more."""
        apart = layer_slots(model, 2, experts=False) if self.policy.gpu_ffn is False else {}
        return layer_slots(model, 2) | apart

    @property
    def weights_tier(self) -> str:
        return PAGEABLE if self.is_staged else PINNED


@config
class CpuAttentionConfig(OffloadingConfig):
    """The settings of schedules in which the CPU attends to all of the cache."""

    policy: GivenPolicy = field(default_factory=partial(GivenPolicy, gpu_ffn=True, resident_kv=0.0))

    def __post_init__(self) -> None:
        super().__post_init__()
        valid = self.policy.gpu_attention is not True
        require(valid, "policy.gpu_attention", "must be false or null: the CPU attends here")
