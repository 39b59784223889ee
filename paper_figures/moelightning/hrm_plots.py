"""Draw MoE-Lightning Fig. 4 and 5: the Hierarchical Roofline Model of one layer of Mixtral-8x7B in decode on an L4
machine.

`predicted`: rates from conf/hardware/l4.yaml, achieved ones drawn solid and peaks dashed; intensities from the model's
dimensions. The paper draws other rates of its own for the same machine (l4.yaml has them).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from harness.hardware.profile import HardwareConfig
from harness.model.spec import ModelSpec
from paper_figures.support import hardware_profile, model_spec, new_figure
from strategies.offloading.planning.hrm import Hierarchy, Level

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NOTE = "MoE-Lightning section 3 (Eq. 4-11); rates of conf/hardware/l4.yaml"
CONTEXT = 512  # caption of Fig. 4
MICRO_BATCH = 128  # section 3.3, Fig. 5
BATCHES = (1, 32, 128, 1024, 4096)  # the text names none of the paper's vertical lines
KV_BITS = {"16-bit": 16, "4-bit": 4}  # float16 and int4 in Fig. 4; computed in 32 bits
_RANGE = (0.25, 8192.0)  # FLOPs per byte


def l4_levels(hardware: HardwareConfig, dtype: str, *, peak: bool, attention: bool) -> Hierarchy:
    """Return the levels GPU, CPU and the link from CPU to GPU. In the rate at which the CPU reads, attention has a
    measured value of its own. The compute roof is always that of matrix products: attention's own was only seen where
    memory limits it."""
    h = hardware
    read = h.cpu_gb_s if attention else h.host_gb_s
    rates = (h.host_peak_gb_s, h.cpu_peak_gflop_s, h.device_peak_gb_s, h.h2d_peak_gb_s) if peak else (
        read, h.cpu_gemm_gflop_s, h.device_gb_s, h.h2d_gb_s,
    )  # fmt: skip
    assert all(rate is not None for rate in rates), f"profile {h.name} lacks a rate"
    cpu_gb_s, cpu_gflop_s, gpu_gb_s, link_gb_s = (float(rate or 0.0) * 1e9 for rate in rates)
    gpu = Level(name="gpu", flops_s=h.gemm_flop_s(dtype, peak=peak), bytes_s=gpu_gb_s)
    cpu = Level(name="cpu", flops_s=cpu_gflop_s, bytes_s=cpu_gb_s)
    return Hierarchy(levels=(gpu, cpu), links_bytes_s={("cpu", "gpu"): link_gb_s})


def attention_intensity(spec: ModelSpec, context: int, kv_bits: int) -> float:
    """Return the FLOPs per byte of decode attention: keys and values once, with the query and the result of each
    sequence."""
    cache_bytes = context * sum(piece.dim for piece in spec.kv_pieces) * kv_bits / 8
    return context * spec.decode_pair_flops / (cache_bytes + (spec.q_dim + spec.o_dim) * spec.dtype_bytes)


def experts_intensity(spec: ModelSpec, tokens: int) -> float:
    """Return the FLOPs per byte of weights when all experts are read once.

    That is about `tokens` top_k / experts in 16 bits, and more where the tokens cannot reach all of them.
    """
    reached = spec.num_experts * (1 - (1 - spec.experts_per_token / spec.num_experts) ** tokens)
    flops = 2 * tokens * spec.experts_per_token * spec.expert_params
    return flops / (reached * spec.expert_params * spec.dtype_bytes)


def compute() -> dict[str, Any]:
    spec, hardware = model_spec("mixtral-8x7b"), hardware_profile("l4")
    own = experts_intensity(spec, MICRO_BATCH)
    figures: dict[str, Any] = {"label": "predicted"}
    for name, is_attention in (("fig4", True), ("fig5", False)):
        roofs = {
            kind: _roofs(l4_levels(hardware, spec.dtype, peak=kind == "peak", attention=is_attention), own)
            for kind in ("achieved", "peak")
        }
        figures[name] = {"roofs": roofs}
    attention = {name: attention_intensity(spec, CONTEXT, bits) for name, bits in KV_BITS.items()}
    levels = l4_levels(hardware, spec.dtype, peak=False, attention=True)
    figures["fig4"]["intensities"] = attention
    figures["fig4"]["fastest_on"] = {
        name: levels.best_level("cpu", {"cpu": intensity, "gpu": intensity}) for name, intensity in attention.items()
    }
    figures["fig4"]["context"] = CONTEXT
    figures["fig5"]["intensities"] = {f"N = {n:,}": experts_intensity(spec, n) for n in BATCHES}
    figures["fig5"] |= {"micro_batch": MICRO_BATCH, "intensity_at_micro_batch": own}
    return figures


def _roofs(h: Hierarchy, own_intensity: float) -> dict[str, float | None]:
    gpu, cpu = h.levels
    return {
        "gpu_flop_s": gpu.flops_s,
        "gpu_bytes_s": gpu.bytes_s,
        "cpu_flop_s": cpu.flops_s,
        "cpu_bytes_s": cpu.bytes_s,
        "link_bytes_s": h.link_bytes_s("cpu", "gpu"),
        "p1_intensity": h.first_turning_point("cpu", "gpu"),
        "p2_intensity": h.second_turning_point("cpu", "gpu", own_intensity),
        "kernel_flop_s": h.local("gpu", own_intensity),
        "balance_intensity": h.balance_point("cpu", "gpu", own_intensity),
    }


def draw_fig4(data: dict[str, Any]) -> Figure:
    figure, axes = _roofline(data["fig4"])
    for name, intensity in data["fig4"]["intensities"].items():
        _vertical(
            axes, intensity, f"{name} KV: {intensity:.1f}, faster on the {data['fig4']['fastest_on'][name].upper()}"
        )
    _mark(axes, data["fig4"]["roofs"]["achieved"], "p1_intensity", "P₁ (Eq. 9)")
    axes.set_title(f"Grouped-query attention in decode, context {data['fig4']['context']}, KV cache in CPU memory")
    return figure


def draw_fig5(data: dict[str, Any]) -> Figure:
    figure, axes = _roofline(data["fig5"])
    fig5 = data["fig5"]
    achieved = fig5["roofs"]["achieved"]
    axes.axhline(achieved["kernel_flop_s"], color="tab:orange", linewidth=1.6)
    axes.text(
        _RANGE[0] * 1.1, achieved["kernel_flop_s"] * 1.12, f"experts on the GPU at μ = {fig5['micro_batch']}",
        color="tab:orange", fontsize=8,
    )  # fmt: skip
    for name, intensity in fig5["intensities"].items():
        _vertical(axes, intensity, name)
    _mark(axes, achieved, "p1_intensity", "P₁ (Eq. 9)")
    _mark(axes, achieved, "p2_intensity", "P₂ = balance point (Eq. 10, 11)")
    axes.set_title("Experts in decode; vertical lines: batch sizes N, each weight read once a batch")
    return figure


def _roofline(data: dict[str, Any]) -> tuple[Figure, Any]:
    figure = new_figure(7.4, 4.6)
    axes = figure.subplots()
    x = np.geomspace(*_RANGE, 400)
    for kind, style in (("achieved", "-"), ("peak", (0, (4, 3)))):
        r = data["roofs"][kind]
        width = 1.8 if kind == "achieved" else 0.9
        lines = (
            ("GPU memory and compute", np.minimum(r["gpu_flop_s"], r["gpu_bytes_s"] * x), "tab:green"),
            ("CPU memory and compute", np.minimum(r["cpu_flop_s"], r["cpu_bytes_s"] * x), "tab:blue"),
            ("link CPU → GPU", np.minimum(r["gpu_flop_s"], r["link_bytes_s"] * x), "tab:red"),
        )
        rates = ((r["gpu_bytes_s"], r["gpu_flop_s"]), (r["cpu_bytes_s"], r["cpu_flop_s"]), (r["link_bytes_s"], None))
        for (name, y, colour), (bytes_s, flop_s) in zip(lines, rates, strict=True):
            sizes = f"{bytes_s / 1e9:.3g} GB/s" + (f", {flop_s / 1e12:.3g} TFLOP/s" if flop_s else "")
            axes.plot(x, y, color=colour, linestyle=style, linewidth=width, label=f"{name}, {kind}: {sizes}")
    axes.set(xscale="log", yscale="log", xlim=_RANGE, ylim=(2e9, 4e15))
    axes.set(xlabel="FLOPs per byte of CPU memory (link, CPU) or of GPU memory (GPU)", ylabel="FLOP/s")
    axes.legend(loc="lower right", fontsize=7)
    return figure, axes


def _vertical(axes: Any, intensity: float, name: str) -> None:
    axes.axvline(intensity, color="0.45", linewidth=0.8, linestyle=":")
    axes.text(intensity * 1.05, 3.4e15, name, rotation=90, fontsize=7, va="top", color="0.3")


def _mark(axes: Any, roofs: dict[str, float], point: str, name: str) -> None:
    """Mark a turning point, which lies on the link's roof."""
    x = roofs[point]
    y = roofs["link_bytes_s"] * x
    axes.plot(x, y, "o", color="black", markersize=5, zorder=5)
    axes.annotate(
        f"{name}: {x:.3g}",
        (x, y),
        xytext=(-6, 8),
        textcoords="offset points",
        fontsize=8,
        ha="right",
        bbox={"boxstyle": "round,pad=0.15", "color": "white", "alpha": 0.85},
    )
