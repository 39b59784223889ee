"""Settings of MoE-Lens; each is an ablation switch."""

from __future__ import annotations

from typing import Literal

from harness.config import config, require
from harness.engine.strategy import Planning, require_packet_mb


@config
class Config:
    planning: Planning = "best"  # the same either way: the profiler of §6.3 is its planner
    overlap_prefill_decode: bool = True  # §5.4; false: static batches, phases apart
    pipeline: Literal["vslpipe", "sequential"] = "vslpipe"  # §6.4; sequential: no alpha/beta split
    attention: Literal["cpu", "gpu"] = "cpu"  # §6.6; gpu: KV comes over the link to the gpu lane
    packet_mb: float = 1.0  # §6.5, the paper uses 100 MB on PCIe 4
    n_real: int | None = None  # §6.3, tokens a pass; null: the pipeline profiler measures it
    gpu_kv_staging_mb: float = 8.0  # device memory of each of two KV staging buffers, where attention is gpu
    profile_repeats: int = 3

    def __post_init__(self) -> None:
        require_packet_mb(self.packet_mb)
        require(self.n_real is None or self.n_real > 0, "n_real", f"must be > 0 or null, got {self.n_real}")
        require(self.gpu_kv_staging_mb > 0, "gpu_kv_staging_mb", f"must be > 0, got {self.gpu_kv_staging_mb}")
        require(self.profile_repeats >= 1, "profile_repeats", f"must be >= 1, got {self.profile_repeats}")
        require(
            self.attention == "cpu" or self.pipeline == "vslpipe",
            "attention",
            "gpu attention is an ablation of pipeline=vslpipe",
        )
