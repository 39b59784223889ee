"""The settings of vLLM with offloaded weights, under vLLM's own names."""

from __future__ import annotations

from typing import ClassVar

from harness.config import config, require
from harness.engine.strategy import require_packet_mb
from harness.memory.placed import ModelParts
from harness.memory.weights import layer_slots, part_slot


@config
class Config:
    """Defaults are those of vLLM 0.8.4 for offline inference (`EngineArgs`, usage context LLM_CLASS) on a GPU with less
    than 70 GiB. There `cpu_offload_gb` is 0 and the user's to choose; null chooses it (`planner.py`)."""

    parallelism: ClassVar[str] = "tensor"

    packet_mb: float = 1.0
    continuous_batching: bool = True
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    gpu_memory_utilization: float = 0.9
    cpu_offload_gb: float | None = None
    num_gpu_blocks_override: int | None = None
    prefetch: bool = False

    def __post_init__(self) -> None:
        require_packet_mb(self.packet_mb)
        require(self.max_num_seqs > 0, "max_num_seqs", f"must be > 0, got {self.max_num_seqs}")
        tokens, share, offload_gb = self.max_num_batched_tokens, self.gpu_memory_utilization, self.cpu_offload_gb
        num_blocks = self.num_gpu_blocks_override
        require(tokens > 0, "max_num_batched_tokens", f"must be > 0, got {tokens}")
        require(0 < share <= 1, "gpu_memory_utilization", f"must be > 0 and at most 1, got {share:g}")
        require(offload_gb is None or offload_gb >= 0, "cpu_offload_gb", f"must be >= 0 or null, got {offload_gb}")
        valid = num_blocks is None or num_blocks > 0
        require(valid, "num_gpu_blocks_override", f"must be > 0 or null, got {num_blocks}")

    def least_weight_bytes(self, model: ModelParts) -> dict[str, int]:
        """Return the device memory that weights take at the least, by name: two layers, or one part at a time."""
        return layer_slots(model, 2) if self.prefetch else part_slot(model)
