"""Simulate PreScope's Fig. 17: how far the CPU's and the GPU's times of a layer lie apart, Mixtral on the A100."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from harness.machine.base import CPU, D2H, GPU
from harness.plan.planning import make_plan
from paper_figures.prescope.cases import OURS, Case
from paper_figures.prescope.published import FIG17_LARGEST_GAP_S, FIG17_MEDIAN_GAP_S
from paper_figures.support import composed, markdown_table

CASE = Case(system="PreScope", gpu="A100", model="mixtral-8x7b", batch=64, generated=5)
SHARES = (50, 90, 100)  # percentiles of layers


def layer_times_s(case: Case) -> list[tuple[float, float]]:
    """Return the seconds of CPU and GPU in each layer of each decode pass, from the router's answer to the last of
    their experts."""
    plan = make_plan(composed(*case.overrides))
    spans = sorted(plan.machine.spans, key=lambda span: span.end_s)
    answered, ends, found = {}, {}, []
    for span in spans:
        if span.kind == "fetch route" and span.lane == D2H:
            answered[span.layer] = span.end_s
        elif span.kind == "experts" and span.lane in (CPU, GPU):
            ends[span.layer, span.lane] = span.end_s
        elif span.kind == "combine" and span.layer in answered:
            start_s = answered.pop(span.layer)
            cpu_s, gpu_s = (max(0.0, ends.pop((span.layer, lane), start_s) - start_s) for lane in (CPU, GPU))
            found.append((cpu_s, gpu_s))
    decoded = (case.generated - 1) * len(plan.engine.spec.moe_layers)  # passes of prefill come first
    return found[-decoded:]


def compute() -> dict[str, Any]:
    rows = [{"system": name, "layers_s": layer_times_s(replace(CASE, system=name))} for name in OURS]
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
