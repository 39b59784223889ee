"""Draw MoE-Lightning Fig. 10: how the best policy for Mixtral-8x7B on two A100 changes with link and host (predicted).

The performance model and the policy search over rates as the paper idealises them: two GPUs count as one with twice the
memory and rates (artifact, performance_model/3d_plot.py: 160 GB, 4 TB/s, 600 TFLOP/s), the host is 200 GB, 100 GB/s and
1.6 TFLOP/s (section 6.3; "m_c = 200GB/s, b_c = 100GB" there has its units swapped) times a scaling ratio of 1 to 10.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from harness.memory.tiers import PINNED
from paper_figures.pool import each
from paper_figures.support import markdown_table, model_spec, new_figure
from strategies.common.workload_shape import WorkloadShape
from strategies.offloading.planning.cost import CostModel, Rates
from strategies.offloading.planning.hrm import Level
from strategies.offloading.planning.memory import Deployment, Storage, Switches, WeightSizes
from strategies.offloading.planning.policy import GivenPolicy, Policy
from strategies.offloading.planning.search import better_policy
from strategies.offloading.planning.task import Search

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NOTE = "MoE-Lightning section 6.3 and Eq. 12-14; 2 x A100-80G, Mixtral-8x7B, prompt 512, g = 32"
PROMPT, GENERATED = 512, 32  # caption of Fig. 10
LINKS_GB_S = (100, 200, 300, 400, 500)
SCALES = tuple(range(1, 11))
GPU_GB, GPU_GB_S, GPU_TFLOP_S = 160, 4000, 600
HOST_GB, HOST_GB_S, HOST_TFLOP_S = 200, 100, 1.6
MOST_REQUESTS = 20_000
_SAME_RATE = 1e-3  # as in the search: policies this close count as equal
SIZES = (1, 2, 3, 4, *range(36, 1029, 32))  # of micro-batches, as the artifact's optimiser tries them


def cost_model(scale: float, link_gb_s: float) -> CostModel:
    spec = model_spec("mixtral-8x7b")
    shape = WorkloadShape.of_lengths(PROMPT, GENERATED, longest_prompt=PROMPT, num_requests=MOST_REQUESTS)
    cpu = Level(name="cpu", flops_s=HOST_TFLOP_S * scale * 1e12, bytes_s=HOST_GB_S * scale * 1e9)
    rates = Rates(
        gpu=Level(name="gpu", flops_s=GPU_TFLOP_S * 1e12, bytes_s=GPU_GB_S * 1e9), cpu_attention=cpu, cpu_ffn=cpu,
        h2d_bytes_s=link_gb_s * 1e9, d2h_bytes_s=link_gb_s * 1e9,
    )  # fmt: skip
    deployment = Deployment(
        spec=spec, sizes=WeightSizes.of_spec(spec), shape=shape, storage=Storage(weights_tier=PINNED),
        capacities_bytes={"device": int(GPU_GB * 1e9), "ram": int(HOST_GB * scale * 1e9)},
    )  # fmt: skip
    return CostModel(deployment=deployment, rates=rates)


def candidates(cost: CostModel, sizes: Sequence[int]) -> Iterator[tuple[float, Policy]]:
    """Yield (sequences a second of a layer, the best policy) for each place of attention and each micro-batch size.

    Left out are sizes that do not fit, and those slower than a smaller one of the same place.
    """
    for gpu_attention in (False, True):
        fastest = 0.0
        for size in sizes:
            given = GivenPolicy(gpu_attention=gpu_attention, gpu_ffn=True, micro_batch_size=size)
            least = 1 if gpu_attention else 2
            task = Search(cost=cost, given=given, min_micro_batches=least, keeps_num_batches=False)
            if policy := better_policy(task, fastest * (1 - _SAME_RATE)):
                yield task.rate(policy), policy
                fastest = max(fastest, task.rate(policy))


def best(scale: float, link_gb_s: float, sizes: Sequence[int] = SIZES) -> dict[str, Any]:
    """Return the best policy of one machine, and by how much it beats the best with attention on the other side.

    Of equally good policies it is the one with the smallest batch.
    """
    cost = cost_model(scale, link_gb_s)
    found = list(candidates(cost, sizes))
    rate = max(reached for reached, _ in found)
    policy = min((p for reached, p in found if reached >= rate * (1 - _SAME_RATE)), key=lambda p: p.batch_size)
    other = max((r for r, p in found if p.gpu_attention != policy.gpu_attention), default=0.0)
    layer = cost.decode(Switches.of(policy))
    kv_bytes = policy.batch_size * cost.deployment.shape.kv_tokens * cost.deployment.spec.kv_bytes_per_token
    return {
        "scale": scale,
        "link_gb_s": link_gb_s,
        **policy.as_record(),
        "weights_on_cpu": 1 - policy.resident_weights,
        "kv_on_cpu": 1 - policy.resident_kv,
        "host_gb": ((1 - policy.resident_weights) * cost.deployment.sizes.layers_bytes
                    + (1 - policy.resident_kv) * kv_bytes) / 1e9,
        "decode_tok_s": rate / cost.deployment.spec.num_layers,
        "gain_over_other_attention": rate / other - 1 if other else None,
        "bottleneck": layer.bottleneck(policy),
    }  # fmt: skip


def compute(
    scales: Sequence[float] = SCALES, links_gb_s: Sequence[float] = LINKS_GB_S, sizes: Sequence[int] = SIZES
) -> dict[str, Any]:
    cells = [(scale, link_gb_s) for link_gb_s in links_gb_s for scale in scales]
    return {"label": "predicted", "rows": list(each(partial(_best, sizes=sizes), cells))}


def _best(cell: tuple[float, float], sizes: Sequence[int]) -> dict[str, Any]:
    return best(*cell, sizes)


def tables(data: dict[str, Any]) -> str:
    columns = {
        "link GB/s": lambda r: f"{r['link_gb_s']:g}",
        "CPU scaling": lambda r: f"{r['scale']:g}",
        "attention": lambda r: "GPU" if r["gpu_attention"] else "CPU",
        "μ": lambda r: str(r["micro_batch_size"]),
        "N": lambda r: f"{r['batch_size']:,}",
        "weights on CPU": lambda r: f"{r['weights_on_cpu']:.0%}",
        "KV on CPU": lambda r: f"{r['kv_on_cpu']:.0%}",
        "GB on the host only": lambda r: f"{r['host_gb']:.0f}",
        "decode tok/s": lambda r: f"{r['decode_tok_s']:,.0f}",
        "over attention on the other side": lambda r: (
            "-" if r["gain_over_other_attention"] is None else f"{r['gain_over_other_attention']:+.0%}"
        ),
        "bound by": lambda r: r["bottleneck"],
    }
    return f"# Fig. 10 (predicted)\n\n{markdown_table(columns, data['rows'])}"


def draw(data: dict[str, Any]) -> Figure:
    """Draw, as in the paper, shares on the CPU over link and host, with red points where the CPU attends."""
    scales, links = (sorted({r[name] for r in data["rows"]}) for name in ("scale", "link_gb_s"))
    figure = new_figure(9.4, 3.9)
    for axes, name, title in zip(
        figure.subplots(1, 2), ("weights_on_cpu", "kv_on_cpu"), ("Weights", "KV cache"), strict=True
    ):
        values = {(r["link_gb_s"], r["scale"]): r[name] for r in data["rows"]}
        grid = [[values[link, scale] for scale in scales] for link in links]
        mesh = axes.pcolormesh(scales, links, grid, cmap="viridis", vmin=0, vmax=1, shading="nearest")
        on_cpu = [(r["scale"], r["link_gb_s"]) for r in data["rows"] if not r["gpu_attention"]]
        axes.plot(*zip(*on_cpu, strict=True), "o", color="tab:red", markersize=5) if on_cpu else None
        axes.set(xlabel="CPU scaling ratio", ylabel="link, GB/s", xticks=scales, yticks=links)
        axes.set_title(f"{title} on the CPU; red: attention there")
        axes.grid(visible=False)
        figure.colorbar(mesh, ax=axes, format=lambda share, _: f"{share:.0%}")
    return figure
