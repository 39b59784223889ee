"""Compare caches of experts with what the best of them could have had: Belady's optimum on the run's own routing.

Every policy runs the same requests with the routing of a recorded trace, pass by pass and whole. Belady's optimum (an
oracle) reads that routing beforehand. `optimum` may let an expert pass by the cache: no cache has more hits.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.engine.sequences import Sequence as Running
from harness.model.spec import ModelSpec
from harness.plan.planning import Plan
from harness.record.passes import PassRecord
from harness.record.provenance import code_version
from harness.routing.activations import read_routing
from harness.routing.base import Routing
from harness.routing.recording import FILE_NAME
from harness.routing.trace_file import TraceHeader, TraceRow, TraceWriter
from harness.study.caches import belady_hits
from paper_figures.latency.grid import RECORDED, TRACES, Case, Row
from paper_figures.passes import planned, simulated_passes
from paper_figures.pool import each
from paper_figures.support import REFERENCE, markdown_table, new_figure, with_one_legend
from strategies.expert_cache.foresight import AsRecorded

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NOTE = (
    "A100; prompts of 512 tokens, 64 generated; routing of the recorded traces; DeepSeek-V2-Lite on 20 GB, since it "
    "fits in 32; hits are experts that lie there when their layer's gate has chosen them"
)
POLICIES = ("lru", "lfu", "arc", "belady")  # the last one needs the routing of the run, known from the first
_COMMAND = "python -m paper_figures.latency caches"  # the routing that the oracle needs is not kept
MEMORY = {"mixtral-8x7b": (), "deepseek-v2-lite": ("hardware.device_memory_gb=20",)}
BATCHES = (4, 32)


def cases() -> list[Case]:
    """Return a case for each model and batch; each has a row for every policy."""
    return [
        Case(system="expert_cache", model=model, gpu="A100", batch=batch, variant=RECORDED, more=MEMORY[model])
        for model, batch in product(MEMORY, BATCHES)
    ]


def compute(chosen: Sequence[Case] | None = None) -> dict[str, Any]:
    return {"label": "simulated", "rows": [row for found in each(rows, chosen or cases()) for row in found]}


def rows(case: Case) -> list[Row]:
    """Run all policies of a case."""
    with tempfile.TemporaryDirectory() as folder:
        recorded = Path(folder) / FILE_NAME
        write_routing(planned(case.overrides), TRACES[case.model], recorded)
        return [row(case, policy, recorded) for policy in POLICIES]


def write_routing(plan: Plan, trace: str, path: Path) -> None:
    """Write the routing of a plan's requests, as a run would record it."""
    spec = plan.engine.spec
    routing = read_routing(REFERENCE / "routing" / f"{trace}.jsonl.gz", spec)
    header = TraceHeader(
        model=spec.name, first_layer=spec.moe_layers[0], layers=len(spec.moe_layers), experts=spec.num_experts,
        k=spec.experts_per_token, source="the routing of a simulated run",
    )  # fmt: skip
    writer = TraceWriter(path, header)
    for sequence in plan.engine.sequences:
        writer.write(TraceRow(sequence.request.request_id, 0, _experts(sequence, routing, spec)))
    writer.close()


def _experts(sequence: Running, routing: Routing, spec: ModelSpec) -> np.ndarray:
    """Return the experts of all tokens of a sequence that go through the model, [positions, layers, k]."""
    positions = np.arange(sequence.max_tokens)
    requests = np.full_like(positions, sequence.request.request_id)
    return np.stack([routing.experts(requests, positions, layer) for layer in spec.moe_layers], axis=1)


def row(case: Case, policy: str, recorded: Path) -> Row:
    """Simulate all passes of a policy."""
    own = [f"strategy.policy={policy}"]
    plan = planned([*case.overrides, *own, *([f"strategy.recorded={recorded}"] if policy == "belady" else [])])
    behind_prefill = plan.strategy.counted()

    def note(record: PassRecord) -> bool:
        nonlocal behind_prefill
        if record.num_prefill_tokens:
            behind_prefill = plan.strategy.counted()
        return False

    passes = simulated_passes(plan, until=note)
    steps = [p["end_s"] - p["start_s"] for p in passes if not p["num_prefill_tokens"]]
    counted, places = plan.strategy.counted(), plan.strategy.plan["on_demand_slots"]
    placer = plan.strategy.pipeline.placer
    return {
        **{name: getattr(case, name) for name in ("system", "model", "gpu", "batch", "variant")},
        "policy": policy,
        "code": code_version(),
        "command": _COMMAND if policy == "belady" else f"python -m harness.plan {' '.join([*case.overrides, *own])}",
        "places": places,
        "experts": plan.engine.spec.num_experts * len(plan.engine.spec.moe_layers),
        "token_s": sum(steps) / len(steps),
        "decode": {name: counted[name] - behind_prefill[name] for name in ("cached", "active")},
        "whole": {name: counted[name] for name in ("cached", "active")},
        "optimum": belady_hits(placer.steps, places) if isinstance(placer, AsRecorded) else None,
    }


def tables(data: dict[str, Any]) -> str:
    """Write hit rates in decode, and those of the whole run with the bound, and seconds per token."""
    found = {(r["model"], r["batch"], r["policy"]): r for r in data["rows"]}
    lines = list(dict.fromkeys((r["model"], r["batch"]) for r in data["rows"]))

    def rate(row: Row, phase: str) -> str:
        return f"{row[phase]['cached'] / row[phase]['active']:.1%}"

    def optimum(row: Row) -> str:
        return f"{row['optimum'] / row['whole']['active']:.1%}"

    def table(cell: Any, more: dict[str, Any] | None = None) -> str:
        columns: dict[str, Any] = {
            "model": lambda key: key[0], "batch": lambda key: str(key[1]),
            "places / experts": lambda key: "{places} / {experts}".format(**found[*key, POLICIES[0]]),
        }  # fmt: skip
        columns |= {_name(policy): lambda key, policy=policy: cell(found[*key, policy]) for policy in POLICIES}
        return markdown_table(columns | (more or {}), lines)

    passing = {"optimum, may pass by (bound)": lambda key: optimum(found[*key, "belady"])}
    return "\n".join(
        [
            f"# Caches with their bound (simulated)\n\n{NOTE}.\n\n## Hit rates of whole runs\n",
            table(lambda row: rate(row, "whole"), passing),
            "## Hit rates in decode\n",
            table(lambda row: rate(row, "decode")),
            "## Seconds per output token\n",
            table(lambda row: f"{row['token_s']:.3g}"),
        ]
    )


def _name(policy: str) -> str:
    return "belady (oracle)" if policy == "belady" else policy


def draw(data: dict[str, Any]) -> Figure:
    """Draw the hit rates in decode, a group of bars for each model and batch."""
    lines = list(dict.fromkeys((r["model"], r["batch"]) for r in data["rows"]))
    figure = new_figure(7, 3.5)
    axes = figure.add_subplot()
    for at, policy in enumerate(POLICIES):
        mine = {(r["model"], r["batch"]): r["decode"] for r in data["rows"] if r["policy"] == policy}
        rates = [mine[line]["cached"] / mine[line]["active"] for line in lines]
        axes.bar([n + 0.2 * (at - 1.5) for n in range(len(lines))], rates, 0.2, label=_name(policy))
    axes.set_xticks(range(len(lines)), [f"{model}\nbatch {batch}" for model, batch in lines])
    axes.set(ylabel="hit rate in decode", ylim=(0, 1))
    return with_one_legend(figure)
