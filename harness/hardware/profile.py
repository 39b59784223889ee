"""A hardware profile: capacities and rates of the machine that is played. Torch-free."""

from __future__ import annotations

from dataclasses import field, fields, replace
from enum import StrEnum

from harness.config import ConfigError, config, require, require_name
from harness.hardware.constants import Constant, Kind, Number, NumberByDtype, OptionalNumber
from harness.memory.tiers import RAM, device_tier

_SIZES = (
    *("device_memory_gb", "pinned_memory_gb", "host_memory_gb", "ram_gb", "ram_times", "ram_plus_gb"),
    "cpu_cores",
)
MOST_GB = 1e9  # an exabyte
PIN_THREADS = 4  # that stage weights of one GPU, as on machine=cuda
LEAST_RATE, MOST_RATE = 1e-6, 1e9  # in 10^9 or 10^12 a second: a link of a kilobyte a second ends no run


class MemorySharing(StrEnum):
    """The rule for what happens when lanes together want more than the host memory has."""

    MAX_MIN = "max_min"  # who asks for less than an equal share gets it, the others split the rest
    PROPORTIONAL = "proportional"  # everyone gets the same fraction of what they ask for


@config
class HardwareConfig:
    """A hardware profile has sizes in 10^9 bytes and rates in 10^9 (tflop: 10^12) per second, for one GPU and its host.

    Null means unknown, and on the emulated machine as fast as the real thing goes. Each number may say its kind and
    source (`constants.py`); plain ones are chosen, and `source` is theirs. A rate is what large work achieves; the one
    with `_peak_` is its upper limit.
    """

    name: str
    source: str
    gpu: str | None = None
    host: str | None = None
    num_gpus: int = 1
    calibrated: bool = False  # on the simulated machine: this computer's own measured costs instead of the rates below

    device_memory_gb: Number  # of each GPU
    pinned_memory_gb: Number  # host memory that the links can read
    host_memory_gb: Number  # pageable host memory
    ram_gb: OptionalNumber = None  # pinned and pageable together
    ram_times: OptionalNumber = None  # ram_gb is so many times model and KV cache, where this or the next is given
    ram_plus_gb: OptionalNumber = None  # and so much beyond
    cpu_cores: OptionalNumber = None

    h2d_gb_s: OptionalNumber = None  # of each GPU, from pinned memory
    h2d_peak_gb_s: OptionalNumber = None
    d2h_gb_s: OptionalNumber = None
    d2h_peak_gb_s: OptionalNumber = None
    p2p_gb_s: OptionalNumber = None  # from GPU to GPU, each direction
    p2p_peak_gb_s: OptionalNumber = None
    transfer_latency_us: OptionalNumber = None  # of each transfer, whatever its size
    pin_gb_s: OptionalNumber = None  # a GPU's staging copies, pageable to pinned; null: by its threads
    pin_thread_gb_s: OptionalNumber = None  # what one of them copies
    pin_threads: int | None = None  # of each GPU; null: `PIN_THREADS`, or as many as the published system has

    gpu_gflop_s: OptionalNumber = None  # holds back the emulated machine's gpu lane
    gemm_tflop_s: NumberByDtype = field(default_factory=dict)  # dense, no sparsity, accumulating in float32
    gemm_peak_tflop_s: NumberByDtype = field(default_factory=dict)
    device_gb_s: OptionalNumber = None  # device memory
    device_peak_gb_s: OptionalNumber = None
    kernel_launch_us: OptionalNumber = None

    host_gb_s: OptionalNumber = None  # host memory, all its users together
    host_peak_gb_s: OptionalNumber = None
    memory_sharing: MemorySharing = MemorySharing.MAX_MIN
    cpu_gb_s: OptionalNumber = None  # host memory as the attention kernel reads it
    cpu_attention_gb_s: OptionalNumber = None  # of the cache, by another kernel (machine=simulated); null: cpu_gb_s
    cpu_gflop_s: OptionalNumber = None  # the attention kernel's
    cpu_latent_gflop_s: OptionalNumber = None  # the attention kernel's over latents
    cpu_gemm_gflop_s: OptionalNumber = None  # matrix products' (experts on the CPU)
    cpu_op_us: OptionalNumber = None  # of each op on the CPU, and each expert of one, whatever its size
    cpu_peak_gflop_s: OptionalNumber = None  # float32

    def __post_init__(self) -> None:
        require_name(self.name)
        threads = self.pin_threads
        require(threads is None or threads >= 1, "pin_threads", f"must be at least 1 or null, got {threads}")
        require(self.num_gpus >= 1, "num_gpus", f"must be >= 1, got {self.num_gpus}")
        require(not self.calibrated or self.gpu is None, "calibrated", "must be false for a real machine's profile")
        for name, constant in self.constants().items():
            expected = _kind_of(name)
            valid = constant.kind in (expected, "chosen")
            require(valid, f"{name}.kind", f"must be {expected} or chosen, got {constant.kind}")
            within = LEAST_RATE <= constant <= MOST_RATE
            is_rate = name.partition(".")[0].endswith(("_gb_s", "flop_s"))
            require(within or not is_rate, name, f"must lie in {LEAST_RATE:g} to {MOST_RATE:g}, got {constant:g}")
        for name in _SIZES:
            if name.endswith("_gb") and (size := getattr(self, name)) is not None:
                require(size <= MOST_GB, name, f"must be at most {MOST_GB:g}, got {size:g}")
        for name in ("pinned_memory_gb", "host_memory_gb"):
            size, ram_gb = getattr(self, name), self.ram_gb
            require(ram_gb is None or size <= ram_gb, name, f"must be at most ram_gb {ram_gb}, got {size:g}")

    def constants(self) -> dict[str, Constant]:
        """Return every number there is, by field (and dtype), each with kind and source."""
        found: dict[str, Constant] = {}
        for item in fields(self):
            value = getattr(self, item.name)
            entries = value.items() if isinstance(value, dict) else [("", value)]
            for key, number in entries:
                if isinstance(number, float):
                    name = f"{item.name}.{key}" if key else item.name
                    constant = number if isinstance(number, Constant) else Constant(number)
                    found[name] = constant if constant.source else Constant(constant, "chosen", self.source)
        return found

    def gemm_flop_s(self, dtype: str, *, peak: bool = False) -> float:
        """Return the achieved (or peak) FLOP/s of large products in `dtype`. Tensor cores are as fast in float16 as in
        bfloat16, so that one rate stands for both; without bfloat16 (T4, V100) float16 is used, as in the papers.
        Raises ConfigError where the profile has no such rate."""
        name = "gemm_peak_tflop_s" if peak else "gemm_tflop_s"
        rates: dict[str, Constant] = getattr(self, name)
        halves = ("float16", "bfloat16")
        for candidate in (dtype, *halves) if dtype in halves else (dtype,):
            if candidate in rates:
                return rates[candidate] * 1e12
        raise ConfigError(f"hardware.{name}", f"profile {self.name!r} states no rate for {dtype}")

    def holding(self, needed_bytes: int) -> HardwareConfig:
        """Return the profile with the host memory of a run that needs `needed_bytes` for its model and KV cache.

        A profile may state its host memory relative to that; one that states gigabytes is returned as it is.
        """
        if self.ram_times is None and self.ram_plus_gb is None:
            return self
        ram_gb = Constant((self.ram_times or 1.0) * needed_bytes / 1e9 + (self.ram_plus_gb or 0.0))
        return replace(self, ram_gb=ram_gb, pinned_memory_gb=ram_gb, host_memory_gb=ram_gb)

    def staged_by(self, threads: int | None, thread_gb_s: float | None = None) -> HardwareConfig:
        """Return the profile with so many staging threads, where it leaves their number to the strategy.

        With `thread_gb_s` a thread copies as much as that on a profile that states a thread's rate."""
        if threads is None or self.pin_threads is not None:
            return self
        stated = None if self.pin_thread_gb_s is None or thread_gb_s is None else Constant(thread_gb_s)
        return replace(self, pin_threads=threads, pin_thread_gb_s=stated or self.pin_thread_gb_s)

    def attending_by(self, times: float | None) -> HardwareConfig:
        """Return the profile with an attention on the CPU that takes `times` as long as the kernel here, where it
        states no such rate."""
        if times is None or self.cpu_gb_s is None or self.cpu_attention_gb_s is not None:
            return self
        return replace(self, cpu_attention_gb_s=Constant(self.cpu_gb_s / times))

    @property
    def staging_gb_s(self) -> float | None:
        """The rate of one GPU's staging copies: that of their threads, and no more than host memory reads and
        writes."""
        if self.pin_gb_s is not None or self.pin_thread_gb_s is None:
            return self.pin_gb_s
        most = float("inf") if self.host_gb_s is None else self.host_gb_s / 2
        return min((self.pin_threads or PIN_THREADS) * self.pin_thread_gb_s, most)

    @property
    def capacities_bytes(self) -> dict[str, int]:
        sizes = {device_tier(rank): self.device_memory_gb for rank in range(self.num_gpus)}
        sizes |= {"pinned": self.pinned_memory_gb, "host": self.host_memory_gb}
        sizes |= {} if self.ram_gb is None else {RAM: self.ram_gb}
        return {tier: int(size * 1e9) for tier, size in sizes.items()}

    @property
    def link_ceilings_gb_s(self) -> dict[str, float]:
        rates = {"h2d": self.h2d_gb_s, "d2h": self.d2h_gb_s, "pin": self.staging_gb_s}
        return {lane: rate for lane, rate in rates.items() if rate is not None}


def require_size_gb(name: str, size_gb: float) -> None:
    """Require at least a byte, in 10^9 bytes."""
    require(1e-9 <= size_gb <= MOST_GB, name, f"must lie between 1e-9 and {MOST_GB:g}, got {size_gb:g}")


def _kind_of(name: str) -> Kind:
    if name in _SIZES:
        return "nominal"
    return "peak" if "_peak_" in name else "achieved"
