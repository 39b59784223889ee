"""Run every system on the emulated machine: a model of few experts, and two of many small ones, tokens verified.

`systems` has all of them on one workload, in rounds. The other tables have single runs: MoE-Gen over the share of
attention on the CPU, small batches, and long prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from harness.config import ConfigError
from harness.memory.tiers import MemoryCapacityError
from harness.model.spec import ModelSpec
from harness.record.store import read_run
from harness.record.trace import read_trace
from harness.run.experiment import RunFailed, run_experiment
from paper_figures.measuring import MOVED, Pass, expert_facts, link_gb, recorded_passes
from paper_figures.moegen.settings import SYSTEMS
from paper_figures.moegen.text import number, percent
from paper_figures.passes import records_of
from paper_figures.support import REFERENCE, composed, markdown_table, model_spec

FOLDER = REFERENCE / "moegen-emulated"
NOTE = "hardware=laptop, two cores, one of which plays the GPU; random weights, synthetic MTBench prompts"
MODELS = ("mixtral-mini", "qwen3-mini", "deepseek-mini")
NUM_REQUESTS, G = 64, 8
ROUNDS = 2  # runs of every system, one of each in turn
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)  # of omega
SMALL = (1, 8)  # requests, on the first two models
LONG = 8  # requests with prompts of 512 tokens, as conf/dataset/gsm8k.yaml has them
OVERLAPPING = {"MoE-Lens": ("strategy.overlap_prefill_decode=true",)}  # whole runs need no phases apart
Row = Mapping[str, Any]
_QUIET = ("wandb.mode=disabled", "progress=false")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run of a system on a model, for a table of the report. `variant` names what `more` changes."""

    table: str
    model: str
    system: str
    num_requests: int = NUM_REQUESTS
    g: int = G
    dataset: str = "mtbench"
    variant: str = ""
    more: tuple[str, ...] = ()

    @property
    def overrides(self) -> list[str]:
        """The overrides as `python run.py` takes them."""
        overlapping = OVERLAPPING.get(self.system, ())
        return [
            *("machine=emulated", "hardware=laptop", *SYSTEMS[self.system], *overlapping, f"model={self.model}"),
            *(f"dataset={self.dataset}", "dataset.synthetic=lengths", f"dataset.num_requests={self.num_requests}"),
            *(f"dataset.max_new_tokens={self.g}", "kv_cache_gb=0.08", *self.more),
        ]


def cases(systems: Sequence[str] = tuple(SYSTEMS), models: Sequence[str] = MODELS, rounds: int = ROUNDS) -> list[Case]:
    found = [
        Case(table="systems", model=model, system=system)
        for _, model, system in product(range(rounds), models, systems)
    ]
    for model in models:
        for share in SHARES:
            more = (f"strategy.policy.cpu_attention={share}",)
            found.append(Case(table="omega", model=model, system="MoE-Gen(H)", variant=f"{share:g}", more=more))
    for model, number_of, system in product(models[:2], SMALL, systems):
        variant = f"{number_of} request{'s' * (number_of > 1)}"
        found.append(Case(table="small", model=model, system=system, num_requests=number_of, variant=variant))
    return [
        *found,
        *(Case(table="long", model=models[0], system=system, num_requests=LONG, dataset="gsm8k") for system in systems),
    ]


def compute(chosen: Sequence[Case] | None = None) -> dict[str, Any]:
    """Run the cases one after another; one that refuses its setting has a row that says why. Runs are not kept."""
    rows: list[dict[str, Any]] = []
    with TemporaryDirectory() as results:
        for case in cases() if chosen is None else chosen:
            named = {"table": case.table, "system": case.system, "model": case.model, "variant": case.variant}
            rows.append({**named, **_ran(case, results), "command": f"python run.py {' '.join(case.overrides)}"})
            told = rows[-1].get("refused") or f"{rows[-1]['tok_s']:.4g} tok/s"
            print(f"{case.table}, {case.model}, {case.system} {case.variant}: {told}", flush=True)
    return {"label": "emulated", "rows": rows}


def _ran(case: Case, results: str) -> dict[str, Any]:
    try:
        summary, folder = run_experiment(composed(f"results_dir={results}", *_QUIET, *case.overrides))
    except (ConfigError, MemoryCapacityError, RunFailed) as error:
        return {"refused": str(error).splitlines()[0]}
    passes = recorded_passes(records_of(read_run(folder)), read_trace(next(folder.glob("trace.json*"))))
    return {
        "tok_s": summary["throughput_tok_s"],
        **_phases(model_spec(case.model), passes),
        "predicted_tok_s": summary["predicted_throughput_tok_s"],
        "accuracy": summary["prediction_accuracy"],
        "policy": {name: value for name, value in summary["plan"].items() if isinstance(value, int | float)},
        "busy": summary["utilization"],
        "verified": f"{summary['verify']['checked']} checked, {summary['verify']['mismatched']} mismatched",
        "without_core": summary["stolen_core_share"],
        "disturbed": summary["disturbed"],
    }


def _phases(spec: ModelSpec, passes: Sequence[Pass]) -> dict[str, Any]:
    """Return tokens a second over passes of one phase alone, and facts of all passes with tokens of that phase.

    The facts are tokens an expert, the experts' rate, and GB over the link a pass.
    """
    found: dict[str, Any] = {}
    for phase, other in (("prefill", "decode"), ("decode", "prefill")):
        mine = [p for p in passes if _tokens(p, phase) and not _tokens(p, other)]
        length_s = sum(p.length_s for p in mine)
        found[f"{phase}_tok_s"] = sum(_tokens(p, phase) for p in mine) / length_s if mine else None
        of_phase = [p for p in passes if _tokens(p, phase)]
        if of_phase:
            moved = {what: sum(link_gb(p, what) for p in of_phase) / len(of_phase) for what in MOVED}
            found[phase] = {**expert_facts(spec, of_phase), "link_gb": moved, "passes": len(of_phase)}
    found["link_gb"] = {what: sum(link_gb(p, what) for p in passes) for what in MOVED}
    return found


def _tokens(it: Pass, phase: str) -> int:
    return it.record.num_prefill_tokens if phase == "prefill" else it.record.num_decode_tokens


def tables(data: dict[str, Any]) -> str:
    """Write medians over the rounds, with the least and the most of throughput."""
    ran: dict[str, dict[tuple[str, str, str], list[Row]]] = {}
    for r in data["rows"]:
        if "refused" not in r:
            of_table = ran.setdefault(r["table"], {})
            of_table.setdefault((r["model"], r["system"], r["variant"]), []).append(r)
    refused = dict.fromkeys(
        f"* {r['model']}, {r['system']}, {r['variant'] or r['table']}: {r['refused']}\n"
        for r in data["rows"]
        if "refused" in r
    )
    return (
        f"# Systems on the emulated machine ({data['label']})\n\n{_systems(ran.get('systems', {}))}\n"
        "Medians over the runs of a row; of throughput also the least and the most. GB are of all weights, keys and "
        f"values of a run over the link.\n\n{''.join(refused)}\n"
        f"## Tokens an expert runs over\n\n{_experts(ran.get('systems', {}))}\n"
        "Of passes with prompts, and of passes with decoding sequences; MoE-Lens and vLLM may have both in one. "
        "GFLOP/s are those of the gpu lane while experts run on it, and GB those of a pass.\n\n"
        f"## MoE-Gen(H) over the share of attention on the CPU\n\n{_line(ran.get('omega', {}), SHARES)}\n"
        "tok/s, single runs; the row above has what the search chose.\n\n"
        f"## Small batches and long prompts\n\n{_others(ran)}\n"
        f"Decode tok/s, single runs: with {' and '.join(map(str, SMALL))} requests, and with {LONG} prompts of 512 "
        "tokens.\n"
    )


def _middle(rows: Sequence[Row], value: Callable[[Row], float | None]) -> float | None:
    found = [each for each in map(value, rows) if each is not None]
    return median(found) if found else None


def _systems(ran: Mapping[tuple[str, str, str], Sequence[Row]]) -> str:
    def beside(rows: Sequence[Row]) -> float | None:
        other = ran.get((rows[0]["model"], "DeepSpeed", ""))
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
        columns[title] = lambda rows, fact=fact: number(_middle(rows, lambda r: r[fact]))
    columns["accuracy"] = lambda rows: percent(_middle(rows, lambda r: r["accuracy"]))
    for what in ("weights", "kv"):
        columns[f"GB: {what}"] = lambda rows, what=what: number(_middle(rows, lambda r: r["link_gb"][what]))
    for lane, title in (("gpu", "busy: gpu"), ("cpu", "cpu"), ("h2d", "link")):
        columns[title] = lambda rows, lane=lane: percent(_middle(rows, lambda r: r["busy"][lane]))
    columns |= {
        "without a core": lambda rows: percent(_middle(rows, lambda r: r["without_core"])),
        "disturbed": lambda rows: str(sum(r["disturbed"] is not None for r in rows)),
        "tokens of a run": lambda rows: ", ".join(sorted({r["verified"] for r in rows})),
    }
    return markdown_table(columns, ran.values())


def _experts(ran: Mapping[tuple[str, str, str], Sequence[Row]]) -> str:
    columns: dict[str, Any] = {"model": lambda rows: rows[0]["model"], "system": lambda rows: rows[0]["system"]}
    for phase in ("prefill", "decode"):
        facts = {
            f"{phase}: tokens": lambda f: f["tokens_an_expert_run"],
            "GFLOP/s": lambda f: f["gpu_flop_s"] and f["gpu_flop_s"] / 1e9,
            "GB": lambda f: sum(f["link_gb"].values()),
        }
        for title, fact in facts.items():
            heading = title if phase in title else f"{phase}: {title}"
            columns[heading] = lambda rows, phase=phase, fact=fact: number(
                _middle(rows, lambda r: fact(r[phase]) if phase in r else None)
            )
    return markdown_table(columns, ran.values())


def _line(ran: Mapping[tuple[str, str, str], Sequence[Row]], shares: Sequence[float]) -> str:
    columns: dict[str, Any] = {"model": str}
    for share in shares:
        columns[f"ω = {share:g}"] = lambda model, share=share: number(
            _middle(ran.get((model, "MoE-Gen(H)", f"{share:g}"), ()), lambda r: r["tok_s"])
        )
    return markdown_table(columns, list(dict.fromkeys(model for model, *_ in ran)))


def _others(ran: Mapping[str, Mapping[tuple[str, str, str], Sequence[Row]]]) -> str:
    columns: dict[str, Any] = {"system": str}
    for table in ("small", "long"):
        for model, variant in dict.fromkeys((model, variant) for model, _, variant in ran.get(table, {})):
            columns[f"{model}, {variant or 'long'}"] = lambda system, key=(model, variant), table=table: number(
                _middle(ran[table].get((key[0], system, key[1]), ()), lambda r: r["decode_tok_s"])
            )
    return markdown_table(columns, list(SYSTEMS))


def _with_range(found: Sequence[float]) -> str:
    return f"{median(found):.3g} ({min(found):.3g}-{max(found):.3g})"
