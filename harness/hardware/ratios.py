"""Compare the emulated machine's ratios with those of the papers' machines: ratios decide where the time goes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from harness.hardware.profile import HardwareConfig
from harness.machine.base import LaneKind, Span

# GPU FLOP per byte over the link, and host memory bytes per byte over the link: numbers of conf/hardware/{a40,t4}.yaml.
REFERENCES: dict[str, dict[str, float]] = {
    # 150 TFLOP/s bf16; 19.5 GB/s and 150 GB/s measured by the authors (MoE-Lens §5, §7, §8.1)
    "A40": {"gpu_flop_per_link_byte": 150e12 / 19.5e9, "host_bytes_per_link_byte": 150 / 19.5},
    # 65 TFLOP/s fp16 tensor peak (T4 data sheet); 12 GB/s as PCIe 3 x16 gives; 100 GB/s in MoE-Lightning's cost model
    "T4": {"gpu_flop_per_link_byte": 65e12 / 12e9, "host_bytes_per_link_byte": 100 / 12},
}


def ratios(hardware: HardwareConfig, spans: Sequence[Span], h2d_gb_s: float | None) -> dict[str, Any] | None:
    """Return the run's own ratios (GPU rate as achieved over all gpu spans) next to the references; None without link
    rate. Where the link is not the profile's, only its real host memory counts, not what is chosen for the cpu lane."""
    busy_s = flops = 0.0
    for span in spans:
        if span.lane.kind is LaneKind.GPU and span.work.flops:
            busy_s += span.end_s - span.start_s
            flops += span.work.flops
    if not h2d_gb_s or busy_s <= 0:
        return None
    link_bytes_s = h2d_gb_s * 1e9
    gpu_flop_s = flops / busy_s
    chosen = hardware.cpu_gb_s if h2d_gb_s == hardware.h2d_gb_s else None
    host = hardware.host_gb_s or chosen
    return {
        "gpu_gflop_s_achieved": gpu_flop_s / 1e9,
        "gpu_flop_per_link_byte": gpu_flop_s / link_bytes_s,
        "host_bytes_per_link_byte": host * 1e9 / link_bytes_s if host else None,
        "references": REFERENCES,
    }
