"""Compute MoE-Lens Table 1: how much CPU memory MoE-Lightning's plans use, by MoE-Lightning's own planner and by ours.

The paper names neither model nor GPU memory, and 265 GB is no sum that its section 7 gives for Mixtral-8x7B. What fits
is Mixtral-8x7B on a GPU of 16 GiB with 265 GiB of host memory, planned as MoE-Lightning's artifact plans
(github.com/caoshiyi/artifacts, branch asplos25, fastmoe/backend). `artifact_plan` states that planner's model again:

* device: all but the experts, a share r_w of the experts, two layers of what is streamed, the hidden states of all
  prompts of the batch and twice those of a micro-batch, two micro-batches' cache of a layer, and 1.2 times what unfused
  experts write for a micro-batch; together at most 86 % of the memory;
* host: the experts that are not on the device, two layers of them pinned, the cache of whole requests and the hidden
  states of all prompts; together at most 80 %;
* time of a layer: the largest of link, CPU attention's reading, GPU's reading of all experts once a micro-batch;
* search: micro-batches of 1 to 4 and then every 32nd size; their number grows until throughput no longer does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from harness.hardware.profile import HardwareConfig
from harness.memory.tiers import PINNED
from harness.model.spec import ModelSpec
from paper_figures.moelightning.fig10 import SIZES, candidates
from paper_figures.support import hardware_profile, markdown_table, model_spec
from strategies.common.workload_shape import WorkloadShape
from strategies.offloading.planning.cost import CostModel, Rates
from strategies.offloading.planning.hrm import Level
from strategies.offloading.planning.memory import Deployment, Storage, Switches, WeightSizes, held_bytes

NOTE = "MoE-Lens Table 1; Mixtral-8x7B assumed"
GIB = 2**30
HOST_GIB, DEVICE_GIB = 265, 16
PUBLISHED = ((98, 32, 0.520), (98, 64, 0.562), (926, 128, 0.350))  # prompt, generated, share of the CPU memory
LONGEST_PROMPT = {98: 450, 926: 1843}  # MoE-Lens Table 3
MOST_REQUESTS = 20_000
_RATES = ("cpu_gflop_s", "cpu_gb_s", "device_gb_s", "h2d_gb_s", "d2h_gb_s", "pin_gb_s")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The machine as the artifact's planner takes it for an L4 host, in bytes a second; the planner knows no A40."""

    device_bytes: float = DEVICE_GIB * GIB
    host_bytes: float = HOST_GIB * GIB
    link: float = 16 * GIB
    device_rate: float = 285 * GIB
    host_rate: float = 100 * GIB


@dataclass(frozen=True, kw_only=True)
class ArtifactPlan:
    micro_batch_size: int
    batch_size: int
    resident: float  # share of the experts that stays on the device
    host_bytes: float
    seconds: float  # of a layer of a decode step

    @property
    def rate(self) -> float:
        return self.batch_size / self.seconds


def artifact_plan(spec: ModelSpec, prompt: int, generated: int, machine: Machine | None = None) -> ArtifactPlan:
    """Return the artifact's best plan."""
    on = machine or Machine()
    found = [plan for size in SIZES if (plan := _most_micro_batches(spec, prompt, generated, size, on)) is not None]
    return max(found, key=lambda plan: plan.rate)


def _most_micro_batches(spec: ModelSpec, prompt: int, generated: int, size: int, on: Machine) -> ArtifactPlan | None:
    best = None
    for plan in _plans(spec, prompt, generated, size, on):
        if best is not None and plan.rate <= best.rate * (1 + 1e-9):
            break
        best = plan
    return best


def _plans(spec: ModelSpec, prompt: int, generated: int, size: int, on: Machine) -> Iterator[ArtifactPlan]:
    """Yield plans with 1, 2, ... micro-batches as long as they fit; r_w is as large as the device allows."""
    experts = spec.num_experts * spec.components["expert"].nbytes  # of a layer
    others = spec.num_layers * (spec.q_dim + spec.kv_dim) * 2 * spec.hidden_dim * spec.dtype_bytes
    token = spec.hidden_dim * spec.dtype_bytes
    kv = spec.kv_bytes_per_token_layer
    unfused = 1.2 * size * prompt * spec.experts_per_token * (spec.hidden_dim + 3 * spec.expert_dim) * spec.dtype_bytes
    moved = (spec.hidden_dim + spec.expert_dim) * spec.dtype_bytes  # input and output of a token
    num_micro_batches = 0
    while True:
        num_micro_batches += 1
        batch = size * num_micro_batches
        in_prefill = (2 * size + batch) * prompt * token + 2 * size * prompt * kv
        room = 0.86 * on.device_bytes - others - max(in_prefill, batch * 2 * token) - unfused - 2 * experts
        resident = min(1.0, room / (experts * (spec.num_layers - 2)))
        kept = batch * ((prompt + generated) * kv * spec.num_layers + prompt * token)
        host = experts * (spec.num_layers + 2) * (1 - resident) + kept
        if resident < 0 or host > 0.8 * on.host_bytes:
            return
        seconds = max(
            experts * (1 - resident) / on.link,
            num_micro_batches * (experts + size * moved) / on.device_rate,
            batch * ((prompt + generated) * kv + 2 * token) / on.host_rate,
        )
        yield ArtifactPlan(
            micro_batch_size=size, batch_size=batch, resident=resident, host_bytes=host, seconds=seconds,
        )  # fmt: skip


def our_plan(prompt: int, generated: int, sizes: Sequence[int] = SIZES) -> dict[str, Any]:
    """Return what the policy search here plans on an A40 with the same memory, and what the plan holds in host
    memory."""
    spec, hardware = model_spec("mixtral-8x7b"), hardware_profile("a40")
    shape = WorkloadShape.of_lengths(
        prompt, generated, longest_prompt=LONGEST_PROMPT[prompt], num_requests=MOST_REQUESTS
    )
    memory = {"device": DEVICE_GIB * GIB, "ram": HOST_GIB * GIB}
    found = []
    for tier in ("device", PINNED):  # where the hidden states of a prefill wait
        deployment = Deployment(
            spec=spec, sizes=WeightSizes.of_spec(spec), shape=shape, capacities_bytes=memory,
            storage=Storage(prefill_hidden_tier=tier),
        )  # fmt: skip
        cost = CostModel(deployment=deployment, rates=_rates(hardware, spec.dtype))
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
        pin_bytes_s=known["pin_gb_s"] * 1e9,
    )  # fmt: skip


def compute(rows: Sequence[tuple[int, int, float]] = PUBLISHED) -> dict[str, Any]:
    spec = model_spec("mixtral-8x7b")
    made = []
    for prompt, generated, share in rows:
        theirs, ours = artifact_plan(spec, prompt, generated), our_plan(prompt, generated)
        made.append({
            "prompt": prompt, "g": generated, "published_share": share,
            "artifact": {"mu": theirs.micro_batch_size, "N": theirs.batch_size, "r_w": theirs.resident,
                         "share": theirs.host_bytes / (HOST_GIB * GIB)},
            "ours": ours,
        })  # fmt: skip
    return {"label": "predicted", "host_gib": HOST_GIB, "device_gib": DEVICE_GIB, "rows": made}


def tables(data: dict[str, Any]) -> str:
    columns = {
        "prompt": lambda r: str(r["prompt"]),
        "g": lambda r: str(r["g"]),
        "published": lambda r: f"{r['published_share']:.1%}",
        "artifact's planner": lambda r: f"{r['artifact']['share']:.1%}",
        "its μ, N": lambda r: f"{r['artifact']['mu']}, {r['artifact']['N']:,}",
        "search here": lambda r: f"{r['ours']['share']:.1%}",
        "our μ, N": lambda r: f"{r['ours']['mu']}, {r['ours']['N']:,}",
        "ours is bound by": lambda r: r["ours"]["bottleneck"],
    }
    return (
        "# Table 1: CPU memory that MoE-Lightning's plans use (predicted)\n\n"
        f"Mixtral-8x7B, {data['host_gib']} GiB of host memory, a GPU of {data['device_gib']} GiB.\n\n"
        f"{markdown_table(columns, data['rows'])}"
    )
