"""Choose what is run at which size.

The sizes are for a GPU, or (dry) for the emulated machine within seconds, so that the logic is tested before it meets a
GPU.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from harness.machine.device.pinned import free_bytes_by_limit

ROOT = Path(__file__).resolve().parents[2]
MODEL = "mixtral-8x7b"
# The two that the papers compare, the floor, the schedules beside them; the one that takes ten minutes last.
_BY_WORTH = ("moelens", "moelightning", "ondemand", "flexgen", "flexgen_c", "fastdecode", "vllm_offload",
             "llamacpp_split", "moegen_g", "moegen_h", "deepspeed_zero")  # fmt: skip
_WIDE_LOOP_GB = 12.0  # of device memory, for two layers and half a batch of 8192 tokens
_SYSTEM_GB = 10.0  # of host memory that is left to the system, Python and buffers
_DRY_DIMENSIONS = {
    "num_layers": 2, "hidden_dim": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "expert_dim": 96,
    "vocab_size": 384, "max_positions": 1024,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Scale:
    """The sizes of one invocation. `layers` is None for all that the model has."""

    dry: bool
    machine: str
    device_gb: float
    pinned_gb: float
    kv_gb: float
    layers: int | None
    num_requests: int
    max_new_tokens: int
    packet_mb: float
    strategies: dict[str, dict[str, Any]]  # their YAMLs by name
    box_s: float  # longest time of one strategy
    token_requests: int
    gemm_size: int
    memory_bytes: int  # of the buffers whose bandwidth is measured
    decode_passes: int  # in a row, by which strategies are compared
    stream_packets_mb: tuple[float, ...]  # of weights that stream alone
    loop_tokens: int  # of half a batch of prompts, in the loop by hand

    @property
    def stop(self) -> str:
        """The override by which a run ends once it has enough passes to compare."""
        return f"stop_after_decode_passes={self.decode_passes}"

    def workload(self) -> list[str]:
        """Return the overrides of run.py that every strategy, measured or simulated, shares; the machine and links are
        apart."""
        dimensions = _DRY_DIMENSIONS if self.dry else {} if self.layers is None else {"num_layers": self.layers}
        return [
            f"model={MODEL}",
            *(f"model.spec.{name}={value}" for name, value in dimensions.items()),
            "dataset=mtbench",
            f"dataset.num_requests={self.num_requests}",
            f"dataset.max_new_tokens={self.max_new_tokens}",
            f"kv_cache_gb={self.kv_gb:g}",
            "hardware=local",
            f"hardware.device_memory_gb={self.device_gb:g}",
            f"hardware.pinned_memory_gb={self.pinned_gb:g}",
            "verify=off",
            "wandb.mode=disabled",
            "progress=false",
        ]


def dry_scale(names: str | None = None) -> Scale:
    return Scale(
        strategies=strategies(names),
        dry=True, machine="emulated", device_gb=0.06, pinned_gb=0.5, kv_gb=0.002, layers=2, num_requests=6,
        max_new_tokens=4, packet_mb=0.05, box_s=100.0, token_requests=3, gemm_size=256, memory_bytes=1 << 22,
        decode_passes=1, stream_packets_mb=(0.01, 0.05), loop_tokens=64,
    )  # fmt: skip


def gpu_scale(
    *,
    host_gb: float | None = None,
    device_gb: float = 16.0,
    kv_gb: float | None = None,
    requests: int | None = None,
    new_tokens: int = 16,
    box_s: float = 80.0,
    names: str | None = None,
    most_layers: int | None = None,
) -> Scale:
    """Scale for all layers (or `most_layers`), or as many as the host's memory holds beside a KV cache."""
    dimensions = yaml.safe_load((ROOT / f"conf/model/{MODEL}.yaml").read_text())["spec"]
    hidden, expert = dimensions["hidden_dim"], dimensions["expert_dim"]
    kv_dim = dimensions["num_kv_heads"] * dimensions["head_dim"]
    attention = 2 * hidden * hidden + 2 * hidden * kv_dim
    layer_gb = 2e-9 * (attention + 3 * dimensions["num_experts"] * hidden * expert)
    ends_gb = 2e-9 * 2 * dimensions["vocab_size"] * hidden
    usable_gb = (host_gb or free_host_gb()) - _SYSTEM_GB
    kv_gb = kv_gb or min(20.0, usable_gb / 5)
    wanted = min(most_layers or dimensions["num_layers"], dimensions["num_layers"])
    layers = int(min(wanted, (usable_gb - kv_gb - ends_gb - 2.0) / layer_gb))
    if layers < 2:
        raise SystemExit(f"{usable_gb:.0f} GB of host memory hold fewer than two layers of {layer_gb:.1f} GB")
    kv_token_gb = 4e-9 * kv_dim * layers
    fitting = int(0.95 * kv_gb / (kv_token_gb * (98 + 16 + new_tokens)))  # mean prompt, and half a block lost
    return Scale(
        strategies=strategies(names),
        dry=False, machine="cuda", device_gb=device_gb, pinned_gb=usable_gb, kv_gb=kv_gb, layers=layers,
        num_requests=requests or max(fitting, 8), max_new_tokens=new_tokens, packet_mb=64.0, box_s=box_s,
        token_requests=8, gemm_size=8192, memory_bytes=1 << 30,
        decode_passes=3, stream_packets_mb=(1.0, 8.0, 64.0),
        loop_tokens=8192 if device_gb >= _WIDE_LOOP_GB else 2048,
    )  # fmt: skip


def free_host_gb() -> float:
    """Return the GB that the system and the control group give at this moment."""
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([installed, *free_bytes_by_limit().values()]) / 1e9


def strategies(names: str | None = None) -> dict[str, dict[str, Any]]:
    """Read the YAMLs of conf/strategy by name; all of them if no names are given, those that tell most first."""
    paths = sorted((ROOT / "conf/strategy").glob("[!_]*.yaml"), key=lambda path: (_worth(path.stem), path.stem))
    found = {path.stem: yaml.safe_load(path.read_text()) for path in paths}
    return {name: found[name] for name in names.split(",")} if names else found


def _worth(name: str) -> int:
    """Return the place of a strategy by what its numbers tell; those that nobody has placed come last."""
    return _BY_WORTH.index(name) if name in _BY_WORTH else len(_BY_WORTH)


def tiny_models() -> list[str]:
    """List small checkpoints, one or more of each family that can be run."""
    paths = sorted((ROOT / "conf/model").glob("[!_]*-tiny.yaml"))
    return [path.stem for path in paths if yaml.safe_load(path.read_text()).get("recipe")]
