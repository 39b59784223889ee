"""Run every system on the emulated machine: a model of few experts, and two of many small ones, tokens verified."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
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
OVERLAPPING = {"MoE-Lens": ("strategy.overlap_prefill_decode=true",)}  # whole runs need no phases apart
_QUIET = ("wandb.mode=disabled", "progress=false")


def overrides(system: str, model: str, *, num_requests: int = NUM_REQUESTS, g: int = G) -> list[str]:
    """Return the overrides as `python run.py` takes them."""
    return [
        *("machine=emulated", "hardware=laptop", *SYSTEMS[system], *OVERLAPPING.get(system, ()), f"model={model}"),
        *("dataset=mtbench", "dataset.synthetic=lengths", f"dataset.num_requests={num_requests}"),
        *(f"dataset.max_new_tokens={g}", "kv_cache_gb=0.08"),
    ]


def compute(
    systems: Sequence[str] = tuple(SYSTEMS), models: Sequence[str] = MODELS, more: Sequence[str] = (), **sizes: int
) -> dict[str, Any]:
    """Run the systems model by model; one that refuses the setting has a row that says why. Runs are not kept."""
    rows = []
    with TemporaryDirectory() as results:
        for model, system in product(models, systems):
            asked = [*overrides(system, model, **sizes), *more]
            rows.append({"system": system, "model": model, **_ran(asked, results)})
            rows[-1]["command"] = f"python run.py {' '.join(asked)}"
            told = rows[-1].get("refused") or f"{rows[-1]['tok_s']:.4g} tok/s"
            print(f"{model}, {system}: {told}", flush=True)
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
    columns = {
        "model": lambda r: r["model"],
        "system": lambda r: r["system"],
        "tok/s": lambda r: number(r["tok_s"]),
        "beside DeepSpeed": lambda r: number(_beside(data["rows"], r)),
        "prefill tok/s": lambda r: number(r["prefill_tok_s"]),
        "decode tok/s": lambda r: number(r["decode_tok_s"]),
        "predicted": lambda r: number(r["predicted_tok_s"]),
        "accuracy": lambda r: percent(r["accuracy"]),
        "busy: gpu": lambda r: percent(r["busy"]["gpu"]),
        "cpu": lambda r: percent(r["busy"]["cpu"]),
        "link": lambda r: percent(r["busy"]["h2d"]),
        "without a core": lambda r: percent(r["without_core"]),
        "disturbed": lambda r: "" if r["disturbed"] is None else "yes",
        "tokens": lambda r: r["verified"],
    }
    refused = "".join(f"* {message}\n" for message in _refused(data["rows"]))
    return (
        f"# Systems on the emulated machine ({data['label']})\n\n"
        f"{markdown_table(columns, [r for r in data['rows'] if 'refused' not in r])}\n{refused}"
    )


def _refused(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    return (f"{r['model']}, {r['system']}: {r['refused']}" for r in rows if "refused" in r)


def _beside(rows: Sequence[Mapping[str, Any]], row: Mapping[str, Any]) -> float | None:
    for other in rows:
        if (other["system"], other["model"]) == ("DeepSpeed", row["model"]) and "refused" not in other:
            return float(row["tok_s"] / other["tok_s"])
    return None
