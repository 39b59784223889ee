"""Draw MoE-Lens Fig. 3 and 4: the GPU utilization that Stage 1 and Stage 2 predict for Mixtral-8x7B on an A40.

`predicted`: equations only. The paper does not say which link rate these figures use; section 5.1, where they stand,
calculates with 32 GB/s, and section 8.1 measures 19.5, which moves every point of saturation to 1.6 times the cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from harness.model.spec import ModelSpec
from paper_figures.moelens.table2 import LINK_GB_S, MEASURED_LINK_GB_S, tokens_decimal
from paper_figures.support import hardware_profile, model_spec, new_figure
from strategies.moelens.equations import parallelism_memory_efficiency, stage1_tok_s, stage2

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NOTE = "MoE-Lens Eq. 2-4, 8-14; Mixtral-8x7B, A40 at its peak of 150 TFLOP/s"
P, G = 100, 128  # captions of Fig. 3 and 4
KV_GB = 100  # Fig. 3a
BLOCK_TOKENS = 16  # kv_block_tokens of conf/config.yaml; the paper's figures do not say
REQUESTS = (5_000, 10_000, 20_000, 50_000, 100_000, 200_000)  # only the last is named in the paper's text
_LENGTHS = [int(n) for n in np.unique(np.geomspace(16, 2048, 57).round())]
_CACHES_GB = [float(gb) for gb in range(5, 605, 5)]


def _a40_tokens(spec: ModelSpec, link_gb_s: float) -> float:
    """Return T_GPU delta: the tokens that the GPU can process while the weights pass the link once."""
    return tokens_decimal(hardware_profile("a40").gemm_flop_s(spec.dtype, peak=True) / 1e12, spec, link_gb_s)


def _stage1(p: float, g: int, kv_gb: float, pass_tokens: float, spec: ModelSpec) -> float:
    """Compute T_max / T_GPU; both are proportional to 1 / delta, so that a delta of 1 s serves."""
    tokens = kv_gb * 1e9 / spec.kv_bytes_per_token
    return stage1_tok_s(p, g, kv_tokens=tokens, delta_s=1.0, gpu_tok_s=pass_tokens) / pass_tokens


def compute() -> dict[str, Any]:
    """Compute all series, with utilization as a share of 1."""
    spec = model_spec("mixtral-8x7b")
    nominal, measured = _a40_tokens(spec, LINK_GB_S), _a40_tokens(spec, MEASURED_LINK_GB_S)
    return {
        "label": "predicted",
        "pass_tokens": {f"{LINK_GB_S:g} GB/s": nominal, f"{MEASURED_LINK_GB_S:g} GB/s": measured},
        "fig3a": {
            "kv_gb": KV_GB,
            "p": _LENGTHS,
            "g": _LENGTHS,
            "utilization": [[_stage1(p, g, KV_GB, nominal, spec) for p in _LENGTHS] for g in _LENGTHS],
        },
        "fig3b": {
            "kv_gb": _CACHES_GB,
            "saturates_gb": {
                f"{rate:g} GB/s": tokens / parallelism_memory_efficiency(P, G) * spec.kv_bytes_per_token / 1e9
                for rate, tokens in ((LINK_GB_S, nominal), (MEASURED_LINK_GB_S, measured))
            },
            "series": {
                f"{rate:g} GB/s": [_stage1(P, G, kv_gb, tokens, spec) for kv_gb in _CACHES_GB]
                for rate, tokens in ((LINK_GB_S, nominal), (MEASURED_LINK_GB_S, measured))
            },
        },
        "fig4": {
            "kv_gb": _CACHES_GB,
            "bound": [_stage1(P, G, kv_gb, nominal, spec) for kv_gb in _CACHES_GB],
            "series": {str(k): _stage2_series(k, nominal, spec) for k in REQUESTS},
        },
    }


def _stage2_series(num_requests: int, pass_tokens: float, spec: ModelSpec) -> list[float | None]:
    """Compute T (p+g) / (g T_GPU) for each cache, and None from where all requests fit it: the paper's equations end
    there."""
    shares: list[float | None] = []
    for kv_gb in _CACHES_GB:
        blocks = int(kv_gb * 1e9) // (BLOCK_TOKENS * spec.kv_bytes_per_token)
        answer = stage2(
            p=P, g=G, num_requests=num_requests, num_blocks=blocks, block_size=BLOCK_TOKENS, delta_s=1.0,
            pass_tokens=pass_tokens,
        )  # fmt: skip
        share = answer.throughput_tok_s * (P + G) / (G * pass_tokens)
        shares.append(None if answer.bound == "workload" else share)
    return shares


def draw_fig3(data: dict[str, Any]) -> Figure:
    figure = new_figure(9.6, 3.9)
    left, right = figure.subplots(1, 2, width_ratios=(1.15, 1))
    a, b = data["fig3a"], data["fig3b"]
    levels = np.linspace(0, 1, 11)
    filled = left.contourf(a["p"], a["g"], a["utilization"], levels=levels, cmap="viridis")
    lines = left.contour(a["p"], a["g"], a["utilization"], levels=levels[1:-1], colors="white", linewidths=0.5)
    left.clabel(lines, levels=levels[2:-1:2], fmt=lambda share: f"{share:.0%}", fontsize=7)
    figure.colorbar(filled, ax=left, format=lambda share, _: f"{share:.0%}")
    left.set(xscale="log", yscale="log", xlabel="prompt tokens p", ylabel="generated tokens g")
    _plain_ticks(left)
    left.set_title(f"(a) {a['kv_gb']} GB of KV cache, {LINK_GB_S:g} GB/s")
    left.grid(False)
    for name, shares in b["series"].items():
        right.plot(b["kv_gb"], shares, label=f"link {name}")
        full = b["saturates_gb"][name]
        right.annotate(f"{full:.0f} GB", (full, 1.0), xytext=(0, 5), textcoords="offset points", fontsize=8)
    right.set(
        xlabel="KV cache (10⁹ bytes)", ylabel="GPU utilization at most, T_max / T_GPU", ylim=(0, 1.12), xlim=(0, 600)
    )
    right.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    right.legend(loc="lower right")
    right.set_title(f"(b) p = {P}, g = {G}")
    return figure


def _plain_ticks(axes: Any) -> None:
    ticks = [16, 32, 64, 128, 256, 512, 1024, 2048]
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(_fixed(ticks))
        axis.set_major_formatter(lambda value, _: f"{value:.0f}")
        axis.set_minor_locator(_fixed([]))


def _fixed(ticks: list[int]) -> Any:
    from matplotlib.ticker import FixedLocator

    return FixedLocator(ticks)


def draw_fig4(data: dict[str, Any]) -> Figure:
    from matplotlib import colormaps

    figure = new_figure(6.4, 4.0)
    axes = figure.subplots()
    fig4 = data["fig4"]
    axes.plot(fig4["kv_gb"], fig4["bound"], color="black", linestyle="--", label="Stage 1 (Eq. 4)")
    for number, (k, shares) in enumerate(reversed(fig4["series"].items())):
        colour = colormaps["viridis"](number / len(fig4["series"]))
        axes.plot(fig4["kv_gb"], [np.nan if s is None else s for s in shares], color=colour, label=f"K = {int(k):,}")
        last = max(i for i, share in enumerate(shares) if share is not None)
        if last + 1 < len(shares):
            axes.plot(fig4["kv_gb"][last], shares[last], "o", color=colour, markersize=4)
    axes.set(
        xlabel="KV cache (10⁹ bytes)", ylabel="GPU utilization, T (p+g) / (g T_GPU)", ylim=(0, 1.05), xlim=(0, 600)
    )
    axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    axes.set_title(f"Stage 2, p = {P}, g = {G}, blocks of {BLOCK_TOKENS}, {LINK_GB_S:g} GB/s; dot: all K fit the cache")
    axes.legend(loc="lower right")
    return figure
