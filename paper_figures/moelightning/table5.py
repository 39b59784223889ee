"""Simulate MoE-Lightning Table 5 (S1, MTBench, g = 128): FlexGen with two policies and MoE-Lightning(p).

Each case runs twice: with the rates of conf/hardware/t4.yaml, and with the slower link that was measured of a T4 in
another cloud. Policies are published, staging is ours. To see where the rest of the difference to the paper lies, the
paper's run times are taken apart: N = 504 at every g, so differences of runs are decode steps and the rest is prefill.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

from paper_figures.moelightning.batches import LONGEST_PROMPT, Case, row
from paper_figures.moelightning.published import S1_SECONDS, TABLE5
from paper_figures.moelightning.systems import HARDWARE, STRATEGIES
from paper_figures.pool import each
from paper_figures.support import markdown_table, model_spec

NOTE = "Mixtral-8x7B, T4, MTBench padded to 418 tokens, g = 128; published: MoE-Lightning Table 5"
G = 128
_S1_BATCH = TABLE5[-1].sizes.batch_size
PROFILES = {  # overrides: a slower link was measured in a cloud, sources in conf/hardware/t4.yaml
    "t4.yaml": (),
    "slower link": ("hardware.h2d_gb_s=9.7", "hardware.d2h_gb_s=9.7"),
}


def cases(g: int = G) -> list[tuple[str, str, Case]]:
    """Return (name of the row, rates, case)."""
    found = []
    for ablation in TABLE5:
        strategy, padded = STRATEGIES[ablation.system]
        case = Case(
            system=ablation.system, strategy=strategy, setting="S1", hardware=HARDWARE["S1"], g=g, padded=padded,
            batch_size=ablation.sizes.batch_size, micro_batch_size=ablation.sizes.micro_batch_size,
            policy_source="published",
        )  # fmt: skip
        found += [(ablation.name, name, replace(case, more=more)) for name, more in PROFILES.items()]
    return found


def compute(chosen: list[tuple[str, str, Case]] | None = None) -> dict[str, Any]:
    published = {ablation.name: ablation.tok_s for ablation in TABLE5}
    wanted, rows = list(cases()) if chosen is None else chosen, []
    for (name, rates, _), made in zip(wanted, each(row, [case for _, _, case in wanted]), strict=True):
        rows.append({"name": name, "rates": rates, "published_tok_s": published[name], **made})
        print(f"{name}, {rates}: {rows[-1]['simulated']['tok_s']:.4g} tok/s", flush=True)
    return {"label": "simulated", "rows": rows, "published_phases": published_phases()}


def published_phases() -> dict[str, Any]:
    """Return the published seconds a decode step takes between two generation lengths of the artifact's runs.

    Also what the shortest run leaves for its prefill if its own steps take the least or the most of these.
    """
    steps = {
        f"{short}-{long}": (S1_SECONDS[long] - S1_SECONDS[short]) / (long - short)
        for short, long in pairwise(sorted(S1_SECONDS))
    }
    first = min(S1_SECONDS)
    prefill = [S1_SECONDS[first] - (first - 1) * step for step in (max(steps.values()), min(steps.values()))]
    return {"label": "published", "step_s": steps, "prefill_s": prefill}


def tables(data: dict[str, Any]) -> str:
    first: dict[str, float] = {}
    for r in data["rows"]:
        first.setdefault(r["rates"], r["simulated"]["tok_s"])
    published = data["rows"][0]["published_tok_s"]
    columns = {
        "": lambda r: r["name"],
        "μ": lambda r: str(r["mu"]),
        "N": lambda r: f"{r['N']:,}",
        "published tok/s": lambda r: f"{r['published_tok_s']:.4g} ({r['published_tok_s'] / published:.2f}x)",
        "rates": lambda r: r["rates"],
        "simulated tok/s": lambda r: (
            f"{r['simulated']['tok_s']:.4g} ({r['simulated']['tok_s'] / first[r['rates']]:.2f}x)"
        ),
        "predicted tok/s": lambda r: f"{r['predicted']['tok_s']:.4g}",
        "prefill s": lambda r: f"{r['simulated']['prefill_s']:.0f}",
        "s a decode step": lambda r: f"{r['simulated']['step_s']:.2f}",
    }
    phases = data["published_phases"]
    low, high = phases["prefill_s"]
    flops = model_spec("mixtral-8x7b").flops_per_token * LONGEST_PROMPT["mtbench_lightning"] * _S1_BATCH
    steps = ", ".join(f"{seconds:.2f} s for tokens {which}" for which, seconds in phases["step_s"].items())
    return (
        f"# Table 5 (simulated)\n\n{markdown_table(columns, data['rows'])}\n"
        f"MoE-Lightning(p) as published, from its runs' times: a decode step takes {steps}; its prefill took "
        f"{low:.0f} to {high:.0f} s, which is {flops / high / 1e12:.1f} to {flops / low / 1e12:.1f} TFLOP/s without "
        "attention.\n"
    )
