"""Settings of MoE-Gen; each is an ablation switch."""

from __future__ import annotations

from dataclasses import field

from harness.config import config
from harness.engine.strategy import Planning, require_packet_mb
from harness.memory.placed import ModelParts
from harness.memory.weights import expert_slots, layer_slots
from strategies.moegen.policy import GivenPolicy


@config
class Config:
    """`padding` is for comparisons with systems that pad, as the paper's are.

    Without `prefetch` experts are brought when the router has chosen them. Without `search` what is not given follows
    from memory alone.
    """

    planning: Planning = "best"  # the same either way: the search of its §4 is its planner
    padding: bool = False
    prefetch: bool = True
    packet_mb: float = 1.0
    search: bool = True
    policy: GivenPolicy = field(default_factory=GivenPolicy)  # Table 2; null: searched

    def __post_init__(self) -> None:
        require_packet_mb(self.packet_mb)

    def least_weight_bytes(self, model: ModelParts) -> dict[str, int]:
        """Return the device memory that weights take at the least, by name: one slot of S_Dense and one of S_Expert.
        Slots that are given and do not fit are refused by the planner, which names them."""
        return layer_slots(model, 1, experts=False) | expert_slots(model, 1)
