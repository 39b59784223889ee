"""Compare the emulated machine's ratios with those of the papers' machines: ratios decide where the time goes."""

from __future__ import annotations

from typing import Any

from harness.hardware.profile import HardwareConfig

# GPU FLOP per byte over the link, and host memory bytes per byte over the link: numbers of conf/hardware/{a40,t4}.yaml.
REFERENCES: dict[str, dict[str, float]] = {
    # 150 TFLOP/s bf16; 19.5 GB/s and 150 GB/s measured by the authors (MoE-Lens §5, §7, §8.1)
    "A40": {"gpu_flop_per_link_byte": 150e12 / 19.5e9, "host_bytes_per_link_byte": 150 / 19.5},
    # 65 TFLOP/s fp16 tensor peak (T4 data sheet); 12 GB/s as PCIe 3 x16 gives; 100 GB/s in MoE-Lightning's cost model
    "T4": {"gpu_flop_per_link_byte": 65e12 / 12e9, "host_bytes_per_link_byte": 100 / 12},
}


def ratios(hardware: HardwareConfig, flops: float, busy_s: float, h2d_gb_s: float | None) -> dict[str, Any] | None:
    """Return the run's own ratios next to the references; None without link rate. Its GPU rate is that of all gpu ops
    that had FLOPs. Where the link is not the profile's, only its real host memory counts, not what is chosen for the
    cpu lane."""
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
