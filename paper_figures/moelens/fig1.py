"""MoE-Lens Fig. 1 and section 3.2: how busy link and GPU are while MoE-Lightning runs, from the simulated A40.

MTBench at 98 and 32 tokens. As built, with the policy of Table 1 and one thread that copies pages into pinned memory;
with the same policy and our staging; and best, with the policy that is searched here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from paper_figures.measuring import first_batch
from paper_figures.moelens.table1 import deployment
from paper_figures.passes import planned
from paper_figures.support import markdown_table, new_figure
from strategies.offloading.published.moelightning import published_plan

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NOTE = "Mixtral-8x7B, A40 held to 16 GB, MTBench lengths 98/32 (synthetic prompts); published: MoE-Lens section 3.2"
PROMPT, G = 98, 32
PUBLISHED = {"prefill": {"h2d": 0.239}, "decode": {"gpu": 0.165}}
_PHASES = ("prefill", "decode")


def settings() -> Mapping[str, Sequence[str]]:
    """Return the overrides by name."""
    plan = published_plan(deployment(PROMPT, G))
    sizes = {"batch_size": plan.batch_size, "micro_batch_size": plan.micro_batch_size}
    given = [f"strategy.policy.{name}={size}" for name, size in sizes.items()] + [
        f"dataset.num_requests={plan.batch_size}"
    ]
    return {
        "as built (Table 1's policy)": [*given, "strategy.planning=as_built"],
        "Table 1's policy, staging as in best": given,
        "best": ["dataset.num_requests=6000"],
    }


def overrides(more: Sequence[str]) -> list[str]:
    return [
        *("strategy=moelightning", "model=mixtral-8x7b", "hardware=a40", "hardware.device_memory_gb=16"),
        *("dataset=mtbench", f"dataset.max_new_tokens={G}", "kv_cache_gb=110", "strategy.packet_mb=100", *more),
    ]


def compute(chosen: Mapping[str, Sequence[str]] | None = None) -> dict[str, Any]:
    rows = []
    for name, more in (settings() if chosen is None else chosen).items():
        plan = planned(overrides(more))
        batch = first_batch(plan)
        policy = plan.strategy.plan
        rows.append({
            "name": name, "N": policy["batch_size"], "mu": policy["micro_batch_size"],
            "planning": policy["planning"],
            "busy": {"prefill": dict(batch.prefill_busy), "decode": dict(batch.decode_busy)},
            "prefill_s": batch.prefill_s, "decode_s": batch.decode_s, "tok_s": batch.throughput_tok_s,
            "command": f"python -m harness.plan {' '.join(overrides(more))}",
        })  # fmt: skip
    return {"label": "simulated", "published": PUBLISHED, "rows": rows}


def tables(data: dict[str, Any]) -> str:
    published = data["published"]
    columns: dict[str, Any] = {"": lambda r: r["name"], "μ, N": lambda r: f"{r['mu']}, {r['N']:,}"}
    for phase in _PHASES:
        for lane, said in (("h2d", "link"), ("gpu", "GPU")):
            known = published[phase].get(lane)
            heading = f"{said} busy in {phase}" + (f" (published {known:.1%})" if known else "")
            columns[heading] = lambda r, phase=phase, lane=lane: f"{r['busy'][phase][lane]:.1%}"
        columns[f"{phase} s"] = lambda r, phase=phase: f"{r[f'{phase}_s']:.0f}"
    columns["tok/s"] = lambda r: f"{r['tok_s']:.0f}"
    return f"# Fig. 1: MoE-Lightning on an A40 (simulated)\n\n{markdown_table(columns, data['rows'])}"


def draw(data: dict[str, Any]) -> Figure:
    """Draw bars of link and GPU in both phases, and a line where a value is published."""
    figure = new_figure(8.0, 3.2)
    blocks = figure.subplots(1, 2, sharey=True)
    for axes, phase in zip(blocks, _PHASES, strict=True):
        for number, row in enumerate(data["rows"]):
            width = 0.8 / len(data["rows"])
            for place, lane in enumerate(("h2d", "gpu")):
                axes.bar(place + (number - (len(data["rows"]) - 1) / 2) * width, row["busy"][phase][lane], 0.92 * width,
                         color=f"C{number}", label=row["name"] if lane == "gpu" else None)  # fmt: skip
        for place, lane in enumerate(("h2d", "gpu")):
            if (known := data["published"][phase].get(lane)) is not None:
                axes.hlines(known, place - 0.42, place + 0.42, color="black", linewidth=1.5, label="published")
        axes.set_xticks((0, 1), ("link", "GPU"))
        axes.set_title(phase)
        axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    blocks[0].set_ylabel("busy")
    figure.legend(*blocks[0].get_legend_handles_labels(), loc="outside upper center", ncols=4)
    return figure
