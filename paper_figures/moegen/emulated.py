"""Run every system on the emulated machine: a model of few experts, and two of many small ones, tokens verified."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from harness.config import ConfigError
from harness.memory.tiers import MemoryCapacityError
from harness.record.store import read_run
from harness.run.experiment import RunFailed, run_experiment
from paper_figures.moegen.settings import SYSTEMS
from paper_figures.moegen.text import number, percent
from paper_figures.support import REFERENCE, composed, markdown_table

FOLDER = REFERENCE / "moegen-emulated"
NOTE = "hardware=laptop, two cores, one of which plays the GPU; random weights, synthetic MTBench prompts"
MODELS = ("mixtral-mini", "qwen3-mini", "deepseek-mini")
NUM_REQUESTS, G = 64, 8
ROUNDS = 3  # runs of every system, one of each in turn
OVERLAPPING = {"MoE-Lens": ("strategy.overlap_prefill_decode=true",)}  # whole runs need no phases apart
Row = Mapping[str, Any]
_QUIET = ("wandb.mode=disabled", "progress=false")


def overrides(system: str, model: str, *, num_requests: int = NUM_REQUESTS, g: int = G) -> list[str]:
    """Return the overrides as `python run.py` takes them."""
    return [
        *("machine=emulated", "hardware=laptop", *SYSTEMS[system], *OVERLAPPING.get(system, ()), f"model={model}"),
        *("dataset=mtbench", "dataset.synthetic=lengths", f"dataset.num_requests={num_requests}"),
        *(f"dataset.max_new_tokens={g}", "kv_cache_gb=0.08"),
    ]


def compute(
    systems: Sequence[str] = tuple(SYSTEMS),
    models: Sequence[str] = MODELS,
    more: Sequence[str] = (),
    rounds: int = ROUNDS,
    **sizes: int,
) -> dict[str, Any]:
    """Run the systems model by model; one that refuses the setting has a row that says why. Runs are not kept."""
    rows = []
    with TemporaryDirectory() as results:
        for turn, model, system in product(range(1, rounds + 1), models, systems):
            asked = [*overrides(system, model, **sizes), *more]
            rows.append({"system": system, "model": model, "round": turn, **_ran(asked, results)})
            rows[-1]["command"] = f"python run.py {' '.join(asked)}"
            told = rows[-1].get("refused") or f"{rows[-1]['tok_s']:.4g} tok/s"
            print(f"round {turn}, {model}, {system}: {told}", flush=True)
    return {"label": "emulated", "rows": rows}


def _ran(asked: Sequence[str], results: str) -> dict[str, Any]:
    try:
        summary, folder = run_experiment(composed(f"results_dir={results}", *_QUIET, *asked))
    except (ConfigError, MemoryCapacityError, RunFailed) as error:
        return {"refused": str(error).splitlines()[0]}
    return {
        "tok_s": summary["throughput_tok_s"],
        **_phases(read_run(folder).passes),
        "predicted_tok_s": summary["predicted_throughput_tok_s"],
        "accuracy": summary["prediction_accuracy"],
        "busy": summary["utilization"],
        "verified": f"{summary['verify']['checked']} checked, {summary['verify']['mismatched']} mismatched",
        "without_core": summary["stolen_core_share"],
        "disturbed": summary["disturbed"],
    }


def _phases(passes: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Return tokens a second over passes of prefill alone, and of decode alone."""
    found = {}
    for phase, other in (("prefill", "decode"), ("decode", "prefill")):
        mine = [p for p in passes if p[f"num_{phase}_tokens"] and not p[f"num_{other}_tokens"]]
        length_s = sum(p["end_s"] - p["start_s"] for p in mine)
        found[f"{phase}_tok_s"] = sum(p[f"num_{phase}_tokens"] for p in mine) / length_s if mine else None
    return found


def tables(data: dict[str, Any]) -> str:
    """Write medians over the rounds, with the least and the most of throughput."""
    ran: dict[tuple[str, str], list[Row]] = {}
    for r in data["rows"]:
        if "refused" not in r:
            ran.setdefault((r["model"], r["system"]), []).append(r)

    def middle(rows: Sequence[Row], value: Callable[[Row], float | None]) -> float | None:
        found = [each for each in map(value, rows) if each is not None]
        return median(found) if found else None

    def beside(rows: Sequence[Row]) -> float | None:
        other = ran.get((rows[0]["model"], "DeepSpeed"))
        return median(r["tok_s"] for r in rows) / median(r["tok_s"] for r in other) if other else None

    columns: dict[str, Any] = {
        "model": lambda rows: rows[0]["model"],
        "system": lambda rows: rows[0]["system"],
        "runs": lambda rows: str(len(rows)),
        "tok/s": lambda rows: _with_range([r["tok_s"] for r in rows]),
        "beside DeepSpeed": lambda rows: number(beside(rows)),
    }
    for name, fact in (("prefill", "prefill_tok_s"), ("decode", "decode_tok_s"), ("predicted", "predicted_tok_s")):
        title = name if name == "predicted" else f"{name} tok/s"
        columns[title] = lambda rows, fact=fact: number(middle(rows, lambda r: r[fact]))
    columns["accuracy"] = lambda rows: percent(middle(rows, lambda r: r["accuracy"]))
    for lane, title in (("gpu", "busy: gpu"), ("cpu", "cpu"), ("h2d", "link")):
        columns[title] = lambda rows, lane=lane: percent(middle(rows, lambda r: r["busy"][lane]))
    columns |= {
        "without a core": lambda rows: percent(middle(rows, lambda r: r["without_core"])),
        "disturbed": lambda rows: str(sum(r["disturbed"] is not None for r in rows)),
        "tokens of a run": lambda rows: ", ".join(sorted({r["verified"] for r in rows})),
    }
    refused = dict.fromkeys(f"* {r['model']}, {r['system']}: {r['refused']}\n" for r in data["rows"] if "refused" in r)
    return (
        f"# Systems on the emulated machine ({data['label']})\n\n{markdown_table(columns, ran.values())}\n"
        f"Medians over the runs of a row; of throughput also the least and the most.\n\n{''.join(refused)}"
    )


def _with_range(found: Sequence[float]) -> str:
    return f"{median(found):.3g} ({min(found):.3g}-{max(found):.3g})"
