"""Simulate the baselines without the three limits of the other reports, beside the same systems as there.

Planning is best here, as in all reports on MoE-Gen; systems' own planners, `strategy.planning=as_built`, are another
thing.

Those reports time prefill and decode apart, for which vLLM and MoE-Lens run static batches, and give FlexGen and
MoE-Lightning the policies that their papers describe. Here vLLM batches continuously and MoE-Lens overlaps prefill with
decode, in runs of all passes over two batches' requests, and the other two search for all of their policy. Where a
whole run would take a quarter of an hour and more to simulate, fewer tokens are decoded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from paper_figures.moegen.rows import Row, computed, find
from paper_figures.moegen.settings import Case, most_sequences, spec_of
from paper_figures.moegen.text import number, percent
from paper_figures.moegen.throughput import MOST_REQUESTS
from paper_figures.support import markdown_table

NOTE = "prompts of 512 tokens (synthetic); rates as in throughput.md"
UNLIMITED = "without limits"
OURS = "MoE-Gen(H)"
# setting, model, tokens to decode, requests of vLLM: twice what its cache holds, or twice its most sequences
WORKLOADS = (
    ("C1", "mixtral-8x7b", 256, 368), ("C2", "mixtral-8x7b", 256, 368), ("C2", "mixtral-8x22b", 256, 198),
    ("C2", "deepseek-v2", 64, 434), ("C2", "deepseek-v2-lite", 256, 512), ("C3", "mixtral-8x7b", 256, 512),
    ("C3", "mixtral-8x22b", 256, 444),
)  # fmt: skip
Workload = tuple[str, str, int, int]
_CHANGED: Mapping[str, tuple[str, ...]] = {
    "vLLM": ("strategy.continuous_batching=true",),
    "FlexGen": ("strategy.policy.gpu_ffn=null", "strategy.policy.resident_kv=null"),
    "MoE-Lightning": ("strategy.policy.gpu_ffn=null", "strategy.policy.resident_kv=null"),
    "MoE-Lens": ("strategy.overlap_prefill_decode=true",),
}
SYSTEMS = tuple(_CHANGED)
_MIXING = ("vLLM", "MoE-Lens")  # all passes of a run are simulated, as no one batch tells it


def limited(system: str, workload: Workload) -> Case:
    """Return the case of the other reports."""
    setting, model, g, _ = workload
    return Case(system=system, setting=setting, model=model, g=g, num_requests=MOST_REQUESTS.get(model))


def without_limits(system: str, workload: Workload) -> Case:
    """Return the case of a system without its limit, with requests for two batches."""
    case = limited(system, workload)
    most = case.num_requests or most_sequences(case.setting, spec_of(case.model), case.prompt, case.g)
    num_requests = workload[-1] if system == "vLLM" else 2 * most
    whole = system in _MIXING
    return replace(case, variant=UNLIMITED, more=_CHANGED[system], num_requests=num_requests, whole=whole)


def cases() -> list[Case]:
    found = []
    for workload in WORKLOADS:
        found.append(limited(OURS, workload))
        for system in SYSTEMS:
            found += [limited(system, workload), without_limits(system, workload)]
    return found


def compute(chosen: Sequence[Case] | None = None) -> dict[str, Any]:
    return {"label": "simulated", "rows": list(computed(cases() if chosen is None else chosen))}


def tables(data: Mapping[str, Any]) -> str:
    rows = data["rows"]
    pairs = [
        (first, second, ours)
        for workload in WORKLOADS
        if (ours := find(rows, limited(OURS, workload)))
        for system in SYSTEMS
        if (first := find(rows, limited(system, workload))) and (second := find(rows, without_limits(system, workload)))
    ]
    columns = {
        "setting": lambda of: of[0]["setting"],
        "model": lambda of: of[0]["model"],
        "g": lambda of: str(of[0]["g"]),
        "system": lambda of: of[0]["system"],
        "as in the other reports, tok/s": lambda of: number(of[0]["tok_s"]),
        "without the limit, tok/s": lambda of: number(of[1]["tok_s"]),
        "changed": lambda of: "; ".join(_CHANGED[of[0]["system"]]).replace("strategy.", ""),
        "policy found": lambda of: _policy(of[1]),
        "sequences": lambda of: f"{of[1]['sequences']:,}",
        "MoE-Gen(H), tok/s": lambda of: number(of[2]["tok_s"]),
        "MoE-Gen(H) / without the limit": lambda of: number(of[2]["tok_s"] / of[1]["tok_s"]),
    }
    return (
        "# Baselines without the three limits (simulated)\n\n"
        "Not `strategy.planning=as_built`, which has the systems' own planners: planning is best here.\n\n"
        f"{markdown_table(columns, pairs)}\n"
        "Tokens a second are over both phases. vLLM and MoE-Lens without the limit are runs of all passes over these "
        "sequences; FlexGen's and MoE-Lightning's are the first batch.\n"
    )


def _policy(row: Row) -> str:
    policy = row["policy"]
    if "gpu_ffn" not in policy:
        return ""
    ffn = "GPU" if policy["gpu_ffn"] else "CPU"
    return f"experts on the {ffn} in decode, {percent(policy['resident_kv'])} of the KV cache on the device"
