"""Simulate MoE-Gen's Fig. 7: decode throughput over the share of the batch that the CPU attends to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from paper_figures.moegen.published import FIG7_BEST_SHARE, FIG7_SEQUENCES, FIG7_SHAPE, INCONSISTENT
from paper_figures.moegen.rows import Row, computed
from paper_figures.moegen.settings import Case
from paper_figures.moegen.text import number, pair, percent
from paper_figures.support import markdown_table, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NOTE = "Mixtral-8x7B, B = 3,640, prompts of 256 tokens, 32 to decode; published: MoE-Gen Fig. 7 (best near 0.6)"
SETTINGS = ("C1", "C3", "C1, CPU 15 GB/s")
SHARES = tuple(tenth / 10 for tenth in range(11))


def cases(settings: Sequence[str] = SETTINGS, shares: Sequence[float] = SHARES) -> list[Case]:
    prompt, g = FIG7_SHAPE
    return [
        Case(
            system="MoE-Gen(H)", setting=setting, model="mixtral-8x7b", prompt=prompt, g=g,
            num_requests=FIG7_SEQUENCES, variant=f"{share:g}", more=(f"strategy.policy.cpu_attention={share:g}",),
        )
        for setting in settings
        for share in shares
    ]  # fmt: skip


def compute(chosen: Sequence[Case] | None = None) -> dict[str, Any]:
    return {"label": "simulated", "rows": list(computed(cases() if chosen is None else chosen))}


def best_share(rows: Sequence[Row], setting: str) -> float | None:
    """Return the share with the highest decode throughput of those that were simulated."""
    found = [r for r in rows if r["setting"] == setting and "refused" not in r]
    return float(max(found, key=lambda r: r["decode_tok_s"])["variant"]) if found else None


def tables(data: dict[str, Any]) -> str:
    columns = {
        "setting": lambda r: r["setting"],
        "ω": lambda r: r["variant"],
        "sequences": lambda r: f"{r['sequences']:,}",
        "decode tok/s": lambda r: number(r["decode_tok_s"]),
        "busy: gpu": lambda r: percent(r["decode"]["busy"]["gpu"]),
        "cpu": lambda r: percent(r["decode"]["busy"]["cpu"]),
        "link": lambda r: percent(r["decode"]["busy"]["h2d"]),
        "s a step": lambda r: number(r["decode"]["pass_s"]),
        "GB a step: weights / KV": lambda r: pair(r["decode"]["link_gb"]["weights"], r["decode"]["link_gb"]["kv"]),
    }
    rows = [r for r in data["rows"] if "refused" not in r]
    best = "; ".join(f"{setting} {number(best_share(rows, setting))}" for setting in SETTINGS)
    return (
        f"# Throughput over ω (simulated)\n\n{markdown_table(columns, rows)}\n"
        f"Best ω here: {best}; published: {FIG7_BEST_SHARE:g}. {INCONSISTENT['setting']}\n"
    )


def draw(data: dict[str, Any]) -> Figure:
    figure = new_figure(6.0, 3.4)
    axes = figure.subplots()
    for setting, colour in zip(SETTINGS, ("#1f4e8c", "#e07b39", "#54a24b"), strict=True):
        rows = [r for r in data["rows"] if r["setting"] == setting and "refused" not in r]
        if rows:
            shares = [float(r["variant"]) for r in rows]
            axes.plot(shares, [r["decode_tok_s"] for r in rows], marker="o", color=colour, label=f"{setting}, here")
    axes.axvline(FIG7_BEST_SHARE, color="0.6", linestyle="--", linewidth=1, label="published best")
    axes.set(xlabel="ω: share of the sequences that the CPU attends for", ylabel="decode tok/s", ylim=(0, None))
    axes.legend()
    return figure
