"""A hardware profile: capacities and rates of the machine that is played. Torch-free."""

from __future__ import annotations

from harness.config import config, require


@config
class HardwareConfig:
    """Sizes in 10^9 bytes, rates in 10^9 per second; null = as fast as the real thing goes."""

    name: str
    source: str
    device_memory_gb: float
    pinned_memory_gb: float
    host_memory_gb: float
    h2d_gb_s: float | None = None
    d2h_gb_s: float | None = None
    pin_gb_s: float | None = None
    cpu_gflop_s: float | None = None
    cpu_gb_s: float | None = None
    gpu_gflop_s: float | None = None

    def __post_init__(self) -> None:
        for field in ("device_memory_gb", "pinned_memory_gb", "host_memory_gb"):
            require(getattr(self, field) > 0, field, f"must be > 0, got {getattr(self, field)}")
        for field in ("h2d_gb_s", "d2h_gb_s", "pin_gb_s", "cpu_gflop_s", "cpu_gb_s", "gpu_gflop_s"):
            rate = getattr(self, field)
            require(rate is None or rate > 0, field, f"must be > 0 or null, got {rate}")

    @property
    def capacities_bytes(self) -> dict[str, int]:
        return {
            "device": int(self.device_memory_gb * 1e9),
            "pinned": int(self.pinned_memory_gb * 1e9),
            "host": int(self.host_memory_gb * 1e9),
        }

    @property
    def link_ceilings_gb_s(self) -> dict[str, float]:
        rates = {"h2d": self.h2d_gb_s, "d2h": self.d2h_gb_s, "pin": self.pin_gb_s}
        return {lane: rate for lane, rate in rates.items() if rate is not None}
