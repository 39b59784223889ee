"""Compute MoE-Lens Table 1: how much CPU memory MoE-Lightning's plans use, by MoE-Lightning's own planner and by ours.

The paper names neither model nor GPU memory, and 265 GB is no sum that its section 7 gives for Mixtral-8x7B. What fits
is Mixtral-8x7B on a GPU of 16 GiB with 265 GiB of host memory, planned as MoE-Lightning's artifact plans
(`strategies.offloading.published.moelightning`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from harness.hardware.profile import HardwareConfig
from harness.memory.tiers import PINNED
from paper_figures.moelightning.fig10 import SIZES, candidates
from paper_figures.support import hardware_profile, markdown_table, model_spec
from strategies.common.workload_shape import WorkloadShape
from strategies.offloading.planning.cost import CostModel, Rates
from strategies.offloading.planning.hrm import Level
from strategies.offloading.planning.memory import Deployment, Storage, Switches, WeightSizes, held_bytes
from strategies.offloading.published.moelightning import published_plan

NOTE = "MoE-Lens Table 1; Mixtral-8x7B assumed"
GIB = 2**30
HOST_GIB, DEVICE_GIB = 265, 16
PUBLISHED = ((98, 32, 0.520), (98, 64, 0.562), (926, 128, 0.350))  # prompt, generated, share of the CPU memory
LONGEST_PROMPT = {98: 450, 926: 1843}  # MoE-Lens Table 3
MOST_REQUESTS = 20_000
_RATES = ("cpu_gflop_s", "cpu_gb_s", "device_gb_s", "h2d_gb_s", "d2h_gb_s", "staging_gb_s")


def deployment(prompt: int, generated: int, prefill_hidden_tier: str = "device") -> Deployment:
    """Return Mixtral-8x7B, a row's lengths and the memory that fits the table."""
    spec = model_spec("mixtral-8x7b")
    return Deployment(
        spec=spec, sizes=WeightSizes.of_spec(spec),
        capacities_bytes={"device": DEVICE_GIB * GIB, "ram": HOST_GIB * GIB},
        shape=WorkloadShape.of_lengths(
            prompt, generated, longest_prompt=LONGEST_PROMPT[prompt], num_requests=MOST_REQUESTS
        ),
        storage=Storage(prefill_hidden_tier=prefill_hidden_tier),
    )  # fmt: skip


def our_plan(prompt: int, generated: int, sizes: Sequence[int] = SIZES) -> dict[str, Any]:
    """Return what the policy search here plans on an A40 with the same memory, and what the plan holds in host
    memory."""
    hardware = hardware_profile("a40")
    found = []
    for tier in ("device", PINNED):  # where the hidden states of a prefill wait
        stored = deployment(prompt, generated, tier)
        cost = CostModel(deployment=stored, rates=_rates(hardware, stored.spec.dtype))
        found += [(rate, policy, cost) for rate, policy in candidates(cost, sizes) if not policy.gpu_attention]
    _, policy, cost = max(found, key=lambda one: one[0])
    return {
        "mu": policy.micro_batch_size,
        "N": policy.batch_size,
        "share": sum(held_bytes(cost.deployment, policy)["ram"].values()) / (HOST_GIB * GIB),
        "bottleneck": cost.decode(Switches.of(policy)).bottleneck(policy),
    }


def _rates(hardware: HardwareConfig, dtype: str) -> Rates:
    known = {name: getattr(hardware, name) for name in _RATES}
    assert None not in known.values(), f"profile {hardware.name} lacks a rate"
    cpu = Level(name="cpu", flops_s=known["cpu_gflop_s"] * 1e9, bytes_s=known["cpu_gb_s"] * 1e9)
    return Rates(
        gpu=Level(name="gpu", flops_s=hardware.gemm_flop_s(dtype), bytes_s=known["device_gb_s"] * 1e9),
        cpu_attention=cpu, cpu_ffn=cpu, h2d_bytes_s=known["h2d_gb_s"] * 1e9, d2h_bytes_s=known["d2h_gb_s"] * 1e9,
        pin_bytes_s=known["staging_gb_s"] * 1e9,
    )  # fmt: skip


def compute(rows: Sequence[tuple[int, int, float]] = PUBLISHED) -> dict[str, Any]:
    made = []
    for prompt, generated, share in rows:
        theirs, ours = published_plan(deployment(prompt, generated)), our_plan(prompt, generated)
        made.append({
            "prompt": prompt, "g": generated, "published_share": share,
            "as_built": {"mu": theirs.micro_batch_size, "N": theirs.batch_size, "r_w": theirs.resident,
                         "share": theirs.host_bytes / (HOST_GIB * GIB)},
            "best": ours,
        })  # fmt: skip
    return {"label": "predicted", "host_gib": HOST_GIB, "device_gib": DEVICE_GIB, "rows": made}


def tables(data: dict[str, Any]) -> str:
    columns = {
        "prompt": lambda r: str(r["prompt"]),
        "g": lambda r: str(r["g"]),
        "published": lambda r: f"{r['published_share']:.1%}",
        "as built": lambda r: f"{r['as_built']['share']:.1%}",
        "its μ, N": lambda r: f"{r['as_built']['mu']}, {r['as_built']['N']:,}",
        "best": lambda r: f"{r['best']['share']:.1%}",
        "its μ, N ": lambda r: f"{r['best']['mu']}, {r['best']['N']:,}",
        "best is bound by": lambda r: r["best"]["bottleneck"],
    }
    return (
        "# Table 1: CPU memory that MoE-Lightning's plans use (predicted)\n\n"
        f"Mixtral-8x7B, {data['host_gib']} GiB of host memory, a GPU of {data['device_gib']} GiB.\n\n"
        f"{markdown_table(columns, data['rows'])}"
    )
