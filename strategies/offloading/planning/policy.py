"""The policy of an offloading strategy: MoE-Lightning's six numbers (Table 1). Torch-free.

A_g, F_g, r_w and r_c refer to the device; the paper's Table 1 swaps the labels of A_g and F_g, its text does not.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from harness.config import config, require


@dataclass(frozen=True, kw_only=True)
class Policy:
    """A policy is the six numbers of Table 1. Raises ConfigError naming the field, as parts of a policy may come from
    a configuration."""

    batch_size: int  # N: sequences of one batch
    micro_batch_size: int  # mu: sequences of a decode micro-batch
    gpu_attention: bool  # A_g
    gpu_ffn: bool  # F_g
    resident_weights: float  # r_w: share of each layer's weights that stays on the device
    resident_kv: float  # r_c: share of the KV cache on the device, where the GPU attends to it whatever A_g says

    def __post_init__(self) -> None:
        require(self.batch_size >= 1, "batch_size", f"must be at least 1, got {self.batch_size}")
        require(
            1 <= self.micro_batch_size <= self.batch_size,
            "micro_batch_size",
            f"must lie between 1 and batch_size {self.batch_size}, got {self.micro_batch_size}",
        )
        _require_share("resident_weights", self.resident_weights)
        _require_share("resident_kv", self.resident_kv)

    @property
    def num_micro_batches(self) -> int:
        return -(-self.batch_size // self.micro_batch_size)

    def as_record(self) -> dict[str, Any]:
        return asdict(self)


@config
class GivenPolicy:
    """The parts of a policy that a configuration fixes; null: the search decides."""

    batch_size: int | None = None
    micro_batch_size: int | None = None
    gpu_attention: bool | None = None
    gpu_ffn: bool | None = None
    resident_weights: float | None = None
    resident_kv: float | None = None

    def __post_init__(self) -> None:
        for name in ("batch_size", "micro_batch_size"):
            size = getattr(self, name)
            require(size is None or size >= 1, name, f"must be at least 1 or null, got {size}")
        if self.batch_size is not None and self.micro_batch_size is not None:
            require(
                self.micro_batch_size <= self.batch_size,
                "micro_batch_size",
                f"must be at most batch_size {self.batch_size}, got {self.micro_batch_size}",
            )
        for name in ("resident_weights", "resident_kv"):
            share = getattr(self, name)
            if share is not None:
                _require_share(name, share)


def _require_share(name: str, share: float) -> None:
    require(0.0 <= share <= 1.0, name, f"must lie between 0 and 1, got {share:g}")
