"""Simulate PreScope's Fig. 17: how far the CPU's and the GPU's times of a layer lie apart, Mixtral on the A100."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.engine import loop
from harness.machine.base import CPU, D2H, GPU, Span
from harness.record.passes import PassRecord
from paper_figures.passes import planned
from paper_figures.prescope.cases import OURS, Case
from paper_figures.prescope.published import FIG17_LARGEST_GAP_S, FIG17_MEDIAN_GAP_S
from paper_figures.support import markdown_table, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CASE = Case(system="PreScope", gpu="A100", model="mixtral-8x7b", batch=64, generated=5)
SHARES = (50, 90, 100)  # percentiles of layers


def layer_times_s(spans: Iterable[Span], windows_s: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the seconds of CPU and GPU in each layer that begins in one of the windows. Both count from the router's
    answer to the last of the side's experts."""
    answered, ends, found = {}, {}, []
    for span in sorted(spans, key=lambda span: span.end_s):
        if span.kind == "fetch route" and span.lane == D2H:
            answered[span.layer] = span.end_s
        elif span.kind == "experts" and span.lane in (CPU, GPU):
            ends[span.layer, span.lane] = span.end_s
        elif span.kind == "combine" and span.layer in answered:
            start_s = answered.pop(span.layer)
            times_s = [max(0.0, ends.pop((span.layer, lane), start_s) - start_s) for lane in (CPU, GPU)]
            if any(begin_s <= start_s < end_s for begin_s, end_s in windows_s):
                found.append((times_s[0], times_s[1]))
    return found


def decode_windows_s(passes: Iterable[PassRecord]) -> list[tuple[float, float]]:
    """Return when the passes without prefill began and ended."""
    return [(p.start_s, p.end_s) for p in passes if p.num_decode_tokens and not p.num_prefill_tokens]


def _simulated(case: Case) -> list[tuple[float, float]]:
    plan = planned(case.overrides)
    plan.machine.drain()
    plan.machine.spans.clear()  # set-up is not part of what is simulated
    passes: list[PassRecord] = []
    loop.run(plan.engine, plan.strategy, passes.append)
    return layer_times_s(plan.machine.spans, decode_windows_s(passes))


def compute() -> dict[str, Any]:
    rows = [{"system": name, "layers_s": _simulated(replace(CASE, system=name))} for name in OURS]
    return {"label": "simulated", "rows": rows}


def tables(data: dict[str, Any]) -> str:
    def gap_ms(row: dict[str, Any], share: int) -> str:
        gaps = [abs(cpu_s - gpu_s) for cpu_s, gpu_s in row["layers_s"]]
        return f"{np.percentile(gaps, share) * 1e3:.3g}"

    columns: dict[str, Any] = {"system": lambda row: row["system"]}
    for share in SHARES:
        columns[f"{share} % of layers within, ms"] = lambda row, share=share: gap_ms(row, share)
    published = f"{FIG17_MEDIAN_GAP_S * 1e3:g} ms for half of the layers, {FIG17_LARGEST_GAP_S * 1e3:g} ms at the most"
    told = "# PreScope, Fig. 17: gap between CPU and GPU in a layer, Mixtral-8x7B on the A100, batch 64 (simulated)"
    return f"{told}\n\n{markdown_table(columns, data['rows'])}\nPublished for PreScope: {published}.\n"


def draw(data: dict[str, Any]) -> Figure:
    """Draw the share of layers over the gap between their two sides, as Fig. 17 does over the sides' times."""
    figure = new_figure(6, 3.6)
    axes = figure.add_subplot()
    for row in data["rows"]:
        gaps = sorted(1e3 * abs(cpu_s - gpu_s) for cpu_s, gpu_s in row["layers_s"])
        axes.step(gaps, np.linspace(0, 100, len(gaps)), where="post", label=row["system"])
    published = [(FIG17_MEDIAN_GAP_S, 50), (FIG17_LARGEST_GAP_S, 100)]
    axes.plot(*zip(*((1e3 * s, share) for s, share in published), strict=True), "kx", label="PreScope, published")
    axes.set(xlabel="gap between CPU and GPU in a layer, ms", ylabel="% of layers within", ylim=(0, 103))
    axes.legend()
    return figure
