"""Compare what MoE-Gen's search predicts for its policy with the simulator and with emulated runs.

Nothing is run for this report: rows come from the other reports of this folder. Where rows say what the search predicts
of each lane, the differences to the simulator are told by phase and lane; `differences` tells them for any policy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from harness.record.summary import accuracy
from paper_figures.moegen.differences import PHASES, differences
from paper_figures.moegen.emulated import FOLDER as EMULATED
from paper_figures.moegen.rows import FOLDER, stored
from paper_figures.moegen.text import number, percent
from paper_figures.support import markdown_table

NOTE = "accuracy = 1 - |predicted - observed| / observed, of tokens a second over prefill and decode"
REPORTS = ("throughput", "small_batches", "long_contexts", "omega", "datasets")


def compute(folder: Path = FOLDER, emulated: Path = EMULATED) -> dict[str, Any]:
    rows = [_simulated(name, r) for name in REPORTS for r in stored(name, folder) if r.get("accuracy") is not None]
    rows += [
        _emulated(r) for r in stored("emulated", emulated) if r.get("accuracy") is not None and r["table"] == "systems"
    ]
    return {"label": "simulated and emulated", "rows": rows}


def _simulated(report: str, row: dict[str, Any]) -> dict[str, Any]:
    fields = ("system", "setting", "model", "prompt", "g", "variant")
    predicted_tok_s = _of_the_batch(row)
    return {
        "report": report, **{name: row[name] for name in fields}, "observed_tok_s": row["tok_s"], "by": "simulated",
        "predicted_tok_s": predicted_tok_s, "accuracy": accuracy(predicted_tok_s, row["tok_s"]),
        "plan_s": row.get("host_seconds", {}).get("plan_s"), "decided_by": _decided_by(row),
        "differences": [vars(difference) for difference in differences(row)],
    }  # fmt: skip


def _of_the_batch(row: dict[str, Any]) -> float:
    """Return what is predicted of the one batch that was simulated. A search's prediction of a whole workload has the
    requests that did not fit it too."""
    search = row.get("search")
    return float(row["g"] / search["request_s"] if search else row["predicted_tok_s"])


def _decided_by(row: dict[str, Any]) -> dict[str, str]:
    """Return, by phase, what decided the predicted time of a layer; nothing where no search told it."""
    search = row.get("search") or {}
    return {phase: search[name] for phase in PHASES if (name := f"{phase}_decided_by") in search}


def _emulated(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "report": "emulated", "system": row["system"], "setting": "laptop", "model": row["model"], "prompt": None,
        "g": None, "variant": "", "predicted_tok_s": row["predicted_tok_s"],
        "accuracy": row["accuracy"], "observed_tok_s": row["tok_s"], "by": "emulated",
    }  # fmt: skip


def tables(data: dict[str, Any]) -> str:
    rows = data["rows"]
    groups = list(dict.fromkeys((r["system"], r["by"], r["report"]) for r in rows))

    def of(group: tuple[str, str, str]) -> Sequence[float]:
        return [r["accuracy"] for r in rows if (r["system"], r["by"], r["report"]) == group]

    columns = {
        "system": lambda group: group[0],
        "observed by": lambda group: group[1],
        "report": lambda group: group[2],
        "cases": lambda group: str(len(of(group))),
        "mean accuracy": lambda group: percent(mean(of(group))),
        "worst": lambda group: percent(min(of(group))),
    }
    ours = {
        "system": lambda r: r["system"],
        "setting": lambda r: r["setting"],
        "model": lambda r: r["model"],
        "prompt": lambda r: number(r["prompt"]),
        "g": lambda r: number(r["g"]),
        "": lambda r: r["variant"],
        "predicted tok/s": lambda r: number(r["predicted_tok_s"]),
        "observed tok/s": lambda r: number(r["observed_tok_s"]),
        "accuracy": lambda r: percent(r["accuracy"]),
        "seconds to plan": lambda r: number(r.get("plan_s")),
    }
    return (
        f"# How right the search is ({data['label']})\n\n{markdown_table(columns, groups)}\n"
        f"## MoE-Gen\n\n{markdown_table(ours, [r for r in rows if r['system'].startswith('MoE-Gen')])}\n"
        "Seconds to plan are those of loading, profiling and searching, on a core beside others at work.\n\n"
        f"## What decides a layer's time\n\n{_deciding(rows)}\n"
        "The critical path of a layer's ops, or the sum of its busiest lane's where that is more.\n\n"
        f"## Where its prediction and the simulator differ\n\n{_by_lane(rows)}\n"
        "Predicted less simulated seconds of a pass, as a share of the simulated pass. A lane's seconds are those in "
        "which it has an op running. Why they differ is said in docs/architecture.md.\n"
    )


def _deciding(rows: Sequence[Mapping[str, Any]]) -> str:
    told = [(phase, by) for r in rows for phase, by in r.get("decided_by", {}).items()]
    columns = {
        "phase": lambda phase: phase,
        "policies": lambda phase: str(sum(of == phase for of, _ in told)),
        "critical path": lambda phase: str(told.count((phase, "path"))),
        "busiest lane's sum": lambda phase: str(told.count((phase, "lane"))),
    }
    return markdown_table(columns, PHASES)


def _by_lane(rows: Sequence[Mapping[str, Any]]) -> str:
    found: dict[tuple[str, str], list[tuple[float, str]]] = {}
    for r in rows:
        for each in r.get("differences", ()):
            case = f"{r['system']}, {r['setting']}, {r['model']}, {r['prompt']}+{r['g']} {r['variant']}".strip()
            found.setdefault((each["phase"], each["lane"]), []).append((each["share"], case))
    columns = {
        "phase": lambda key: key[0],
        "lane": lambda key: key[1],
        "cases": lambda key: str(len(found[key])),
        "mean": lambda key: f"{mean(share for share, _ in found[key]):+.1%}",
        "least": lambda key: f"{min(found[key])[0]:+.1%}",
        "most": lambda key: f"{max(found[key])[0]:+.1%}",
        "farthest": lambda key: max(found[key], key=lambda of: abs(of[0]))[1],
    }
    return markdown_table(columns, list(found))
