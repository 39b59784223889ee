"""Simulate PreScope's Fig. 17: how far the CPU's and the GPU's times of a layer lie apart, Mixtral on the A100."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.engine import loop
from harness.machine.base import CPU, D2H, GPU, H2D, Span
from harness.record.passes import PassRecord
from harness.record.provenance import code_version
from paper_figures.passes import planned
from paper_figures.pool import each
from paper_figures.prescope.cases import OURS, Case
from paper_figures.prescope.published import FIG17_LARGEST_GAP_S, FIG17_MEDIAN_GAP_S
from paper_figures.support import markdown_table, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CASE = Case(system="PreScope", gpu="A100", model="mixtral-8x7b", batch=64, generated=5)
# HybriMoE's gate looks three layers ahead: for the next one as recorded of a small model, and with 4 points less for
# each further one, as in results/reference/latency-simulated.
GATE_HITS = "routing.hit_rates=[[0.82],[0.78],[0.74]]"
CASES = (
    *(replace(CASE, system=name) for name in OURS),
    replace(CASE, system="HybriMoE", more=(GATE_HITS,)),
    replace(CASE, system="Fiddler"),
)
NOTE = "Mixtral-8x7B, batch 64; the layers of four steps of decode behind prompts of 512 tokens"
SHARES = (50, 90, 100)  # percentiles of layers


Times = tuple[float, float, float]


def layer_times_s(spans: Iterable[Span], windows_s: Sequence[tuple[float, float]]) -> list[Times]:
    """Return the seconds of CPU, GPU and link in each layer that begins in one of the windows.

    They count from the router's answer to the last expert that the side computes. The link's last transfer is the last
    one, on demand or ahead, that begins before both sides have finished.
    """
    by_ticket: dict[int, list[Span]] = {}
    for span in spans:
        if span.kind == "weights" and span.lane == H2D:
            by_ticket.setdefault(span.ticket, []).append(span)
    transfers = sorted((min(s.start_s for s in each), max(s.end_s for s in each)) for each in by_ticket.values())
    begun = [start_s for start_s, _ in transfers]
    answered, ends, found = {}, {}, []
    for span in sorted(spans, key=lambda span: span.end_s):
        if span.kind == "fetch route" and span.lane == D2H:
            answered[span.layer] = span.end_s
        elif span.kind == "experts" and span.lane in (CPU, GPU):
            ends[span.layer, span.lane] = span.end_s
        elif span.kind == "combine" and span.layer in answered:
            start_s = answered.pop(span.layer)
            sides = [max(start_s, ends.pop((span.layer, lane), start_s)) for lane in (CPU, GPU)]
            last = bisect_left(begun, max(sides)) - 1
            link_s = max(start_s, transfers[last][1]) if last >= 0 else start_s
            if any(begin_s <= start_s < end_s for begin_s, end_s in windows_s):
                found.append((sides[0] - start_s, sides[1] - start_s, link_s - start_s))
    return found


def gaps_s(times: Iterable[Times], *, with_link: bool) -> list[float]:
    """Return the seconds between both sides of each layer; `with_link` counts transfers to the GPU's side."""
    return [abs(cpu_s - (max(gpu_s, link_s) if with_link else gpu_s)) for cpu_s, gpu_s, link_s in times]


def decode_windows_s(passes: Iterable[PassRecord]) -> list[tuple[float, float]]:
    """Return when the passes without prefill began and ended."""
    return [(p.start_s, p.end_s) for p in passes if p.num_decode_tokens and not p.num_prefill_tokens]


def _simulated(case: Case) -> list[Times]:
    plan = planned(case.overrides)
    plan.machine.drain()
    plan.machine.spans.clear()  # set-up is not part of what is simulated
    passes: list[PassRecord] = []
    loop.run(plan.engine, plan.strategy, passes.append)
    return layer_times_s(plan.machine.spans, decode_windows_s(passes))


def compute() -> dict[str, Any]:
    code = code_version()
    rows = [
        {"system": case.system, "code": code, "command": case.command, "layers_s": layers_s}
        for case, layers_s in zip(CASES, each(_simulated, CASES), strict=True)
    ]
    return {"label": "simulated", "rows": rows}


def overruns_s(times: Iterable[Times]) -> list[float]:
    """Return by how many seconds the link ends later than both sides, of the layers in which it does."""
    return [link_s - max(cpu_s, gpu_s) for cpu_s, gpu_s, link_s in times if link_s > max(cpu_s, gpu_s)]


def tables(data: dict[str, Any]) -> str:
    def gap_ms(row: dict[str, Any], share: int, *, with_link: bool) -> str:
        return f"{np.percentile(gaps_s(row['layers_s'], with_link=with_link), share) * 1e3:.3g}"

    columns: dict[str, Any] = {"system": lambda row: row["system"]}
    for share, with_link in product(SHARES, (True, False)):
        name = f"{share} % of layers, ms" + ", without transfers" * (not with_link)
        columns[name] = lambda row, share=share, with_link=with_link: gap_ms(row, share, with_link=with_link)
    columns |= {
        "layer, mean ms": lambda row: f"{np.mean([max(each[:2]) for each in row['layers_s']]) * 1e3:.3g}",
        "link last": lambda row: f"{len(overruns_s(row['layers_s'])) / len(row['layers_s']):.0%}",
        "by, median ms": lambda row: (
            f"{np.median(late_s) * 1e3:.3g}" if (late_s := overruns_s(row["layers_s"])) else "-"
        ),
    }
    published = f"{FIG17_MEDIAN_GAP_S * 1e3:g} ms for half of the layers, {FIG17_LARGEST_GAP_S * 1e3:g} ms at the most"
    told = "# PreScope, Fig. 17: gap between CPU and GPU in a layer, Mixtral-8x7B on the A100, batch 64 (simulated)"
    legend = (
        "A layer counts from the router's answer to the last expert that either side computes. Link last: the share "
        "of layers in which a transfer that began before that ends after it, and by how much."
    )
    return f"{told}\n\n{markdown_table(columns, data['rows'])}\n{legend} Published for PreScope: {published}.\n"


def draw(data: dict[str, Any]) -> Figure:
    """Draw the share of layers over the gap between their two sides, as Fig. 17 does over the sides' times."""
    figure = new_figure(6, 3.6)
    axes = figure.add_subplot()
    for row in data["rows"]:
        gaps = sorted(1e3 * each for each in gaps_s(row["layers_s"], with_link=True))
        axes.step(gaps, np.linspace(0, 100, len(gaps)), where="post", label=row["system"])
    published = [(FIG17_MEDIAN_GAP_S, 50), (FIG17_LARGEST_GAP_S, 100)]
    axes.plot(*zip(*((1e3 * s, share) for s, share in published), strict=True), "kx", label="PreScope, published")
    axes.set(
        xlabel="gap in a layer between the CPU and the GPU with its transfers, ms",
        ylabel="% of layers within",
        ylim=(0, 103),
    )
    axes.legend()
    return figure
