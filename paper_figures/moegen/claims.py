"""Hold MoE-Gen's claims against what the other reports of this folder have: a verdict is computed, never typed.

A claim compares MoE-Gen, with or without attention on the CPU, whichever is better, with the systems of model-based
batching: DeepSpeed, and FlexGen and MoE-Lightning with the best policies of the kind that their papers describe.
Nothing is simulated for this report.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paper_figures.moegen import datasets, long_contexts, traffic
from paper_figures.moegen.published import (
    CLAIMS,
    DATASETS,
    INCONSISTENT,
    MODEL_BASED,
    OURS,
    TABLE1,
    TABLE4_HOURS,
    TABLE6,
    TABLE8,
    TABLE8_SHAPES,
    Claim,
)
from paper_figures.moegen.rows import FOLDER, Row, find, stored
from paper_figures.moegen.settings import Case
from paper_figures.moegen.text import number, percent
from paper_figures.moegen.throughput import TABLE1_SIZES
from paper_figures.support import markdown_table

NOTE = "claims of MoE-Gen's abstract and section 1, beside the simulated reports of this folder"
MIXTRALS = ("mixtral-8x7b", "mixtral-8x22b")
DECODED = (*((model, g) for model in MIXTRALS for g in (256, 1024)), ("deepseek-v2", 256))


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """A ratio says how many times better MoE-Gen is than a baseline on one workload; `why` tells what both do."""

    workload: str
    over: str
    here: float
    why: str = ""


def compute(folder: Path = FOLDER) -> dict[str, Any]:
    """Compare what there is. A claim whose rows are missing has no ratios."""
    throughput = stored("throughput", folder)
    found = {
        "time": list(_times(stored("datasets", folder))),
        "decode": list(_phase(throughput, "decode", DECODED)),
        "prefill": list(_phase(throughput, "prefill", [("deepseek-v2", 256)])),
        "long": list(_long(stored("long_contexts", folder))),
        "traffic": list(_traffic(stored("traffic", folder))),
    }
    small = list(_phase(throughput, "decode", [("deepseek-v2", 256)], variant=TABLE1_SIZES))
    small_prefill = list(_phase(throughput, "prefill", [("deepseek-v2", 256)], variant=TABLE1_SIZES))
    return {
        "label": "simulated",
        "claims": [
            {
                "claim": name,
                "published_tables": _range(_published(name)),
                "here": _range(ratio.here for ratio in found[name]),
                "verdict": verdict(CLAIMS[name], [ratio.here for ratio in found[name]]),
                "ratios": [vars(ratio) for ratio in found[name]],
            }
            for name in CLAIMS
        ],
        "with_table_1_sizes": {
            phase: _range(ratio.here for ratio in ratios)
            for phase, ratios in (("decode", small), ("prefill", small_prefill))
        },
    }


def verdict(claim: Claim, here: Sequence[float]) -> str:
    """Judge a claim by the ratios that come out here. An "up to" (low = 1) is judged by the largest one alone."""
    if not here:
        return "not computed"
    if claim.low == 1:
        return "reached" if max(here) >= claim.high else "in part" if max(here) > claim.high / 2 else "not reached"
    if min(here) >= claim.low:
        return "reached"
    return "in part" if max(here) >= claim.low else "not reached"


def _best(rows: Iterable[Row], fact: str, **case: Any) -> Row | None:
    """Return MoE-Gen's better variant."""
    found = [r for system in OURS if (r := find(rows, Case(system=system, **case))) is not None]
    return max(found, key=lambda r: float(r[fact]), default=None)


def _phase(rows: Sequence[Row], phase: str, workloads: Iterable[tuple[str, int]], variant: str = "") -> Iterable[Ratio]:
    fact = f"{phase}_tok_s"
    for model, g in workloads:
        case: dict[str, Any] = {"setting": "C2", "model": model, "g": g}
        ours = _best(rows, fact, **case)
        for system in MODEL_BASED:
            given: dict[str, Any] = {"variant": variant, "num_requests": 20} if variant else {}
            theirs = find(rows, Case(system=system, **case, **given))
            if ours and theirs:
                yield Ratio(
                    workload=f"{model}, {g}", over=system, here=ours[fact] / theirs[fact],
                    why=_why(ours, theirs, phase),
                )  # fmt: skip


def _why(ours: Row, theirs: Row, phase: str) -> str:
    def told(r: Row) -> str:
        of = r[phase]
        lane = max(of["busy"], key=lambda name: of["busy"][name])
        names = {"h2d": "link", "d2h": "link to the host", "pin": "staging"}
        return (
            f"{r['system']}: {r['sequences']:,} sequences, {number(of['tokens_an_expert_run'])} tokens an expert run, "
            f"{names.get(lane, lane)} {percent(of['busy'][lane])} busy"
        )

    return f"{told(ours)}. {told(theirs)}."


def _times(rows: Sequence[Row]) -> Iterable[Ratio]:
    for dataset in DATASETS:
        ours = [h for system in OURS if (h := datasets.hours(rows, system, dataset)) is not None]
        for system in MODEL_BASED:
            theirs = datasets.hours(rows, system, dataset)
            if ours and theirs is not None:
                why = f"{number(min(ours))} h against {number(theirs)} h."
                yield Ratio(workload=dataset, over=system, here=theirs / min(ours), why=why)


def _long(rows: Sequence[Row]) -> Iterable[Ratio]:
    for shape in TABLE8_SHAPES:
        mine = [r for system in OURS if (r := long_contexts.row_of(rows, system, shape)) is not None]
        ours = max(mine, key=lambda r: float(r["decode_tok_s"]), default=None)
        for system in MODEL_BASED:
            theirs = long_contexts.row_of(rows, system, shape)
            if ours and theirs:
                yield Ratio(
                    workload=f"{shape[0]}-{shape[1]}", over=system,
                    here=ours["decode_tok_s"] / theirs["decode_tok_s"], why=_why(ours, theirs, "decode"),
                )  # fmt: skip


def _traffic(rows: Sequence[Row]) -> Iterable[Ratio]:
    for gpu, name in traffic.GPUS.items():
        for num_requests in (*traffic.REQUESTS, *traffic.DATASETS):
            found = [times for ours in OURS if (times := traffic.saving(rows, ours, gpu, num_requests)) is not None]
            if found:
                yield Ratio(workload=f"{name}, {num_requests:,} requests", over=traffic.PEER, here=max(found))


def _published(name: str) -> Iterable[float]:
    """Return the ratios that the paper's own tables have for a claim; none for traffic, which is in a picture."""
    if name == "time":
        for dataset in DATASETS:
            yield from (TABLE4_HOURS[s][dataset] / TABLE4_HOURS["MoE-Gen(H)"][dataset] for s in MODEL_BASED)
    elif name == "decode":
        for column, ours in TABLE6["MoE-Gen(H)"].items():
            yield from (ours / TABLE6[s][column] for s in MODEL_BASED)
        yield from (TABLE1["MoE-Gen"]["decode"].tok_s / TABLE1[s]["decode"].tok_s for s in MODEL_BASED)
    elif name == "prefill":
        yield from (TABLE1["MoE-Gen"]["prefill"].tok_s / TABLE1[s]["prefill"].tok_s for s in MODEL_BASED)
    elif name == "long":
        for at in range(len(TABLE8_SHAPES)):
            yield from (TABLE8["MoE-Gen(H)"][at][1] / TABLE8[s][at][1] for s in MODEL_BASED)


def _range(values: Iterable[float]) -> list[float] | None:
    found = list(values)
    return [min(found), max(found)] if found else None


def tables(data: dict[str, Any]) -> str:
    def told(values: list[float] | None) -> str:
        return "" if values is None else " to ".join(dict.fromkeys(map(number, values)))

    def claimed(name: str) -> str:
        claim = CLAIMS[name]
        low = "up to " if claim.low == 1 else f"{number(claim.low)} to "
        return f"{low}{number(claim.high)} times {claim.name} ({claim.source})"

    columns = {
        "claim": lambda c: claimed(c["claim"]),
        "the paper's tables": lambda c: told(c["published_tables"]),
        "here": lambda c: told(c["here"]),
        "verdict": lambda c: c["verdict"],
        "largest here": lambda c: _extreme(c["ratios"], max),
        "smallest here": lambda c: _extreme(c["ratios"], min),
    }
    sizes = data["with_table_1_sizes"]
    return (
        f"# Claims (simulated)\n\n{markdown_table(columns, data['claims'])}\n"
        "All are over DeepSpeed, FlexGen and MoE-Lightning. The policies of the last two are the best that their "
        "searches find on this engine with experts on the GPU and no keys and values there (`gpu_ffn=true`, "
        "`resident_kv=0`); `unlimited.md` has searches without these limits. With the batch sizes that follow from "
        "Table 1's tokens an expert (twice that for MoE-Lightning, which needs two micro-batches), DeepSeek-V2 on C2 "
        "comes to "
        f"{told(sizes['decode']) or '-'} times in decode and {told(sizes['prefill']) or '-'} times in prefill.\n\n"
        f"{INCONSISTENT['claim']}\n\n## By baseline\n\n{_by_baseline(data['claims'])}\n"
        f"## Every ratio\n\n{_every(data['claims'])}"
    )


def _by_baseline(claims: Sequence[Mapping[str, Any]]) -> str:
    """Judge each claim over each system by itself."""
    ratios: dict[tuple[str, str], list[float]] = {}
    for c in claims:
        for ratio in c["ratios"]:
            ratios.setdefault((c["claim"], ratio["over"]), []).append(ratio["here"])
    columns = {
        "claim": lambda of: CLAIMS[of[0]].name,
        "over": lambda of: of[1],
        "here": lambda of: " to ".join(dict.fromkeys(map(number, (min(ratios[of]), max(ratios[of]))))),
        "verdict": lambda of: verdict(CLAIMS[of[0]], ratios[of]),
    }
    return markdown_table(columns, list(ratios))


def _extreme(ratios: Sequence[Mapping[str, Any]], which: Any) -> str:
    if not ratios:
        return ""
    of = which(ratios, key=lambda r: r["here"])
    return f"{of['workload']}, over {of['over']}: {number(of['here'])}. {of['why']}".strip()


def _every(claims: Sequence[Mapping[str, Any]]) -> str:
    columns = {
        "claim": lambda of: CLAIMS[of[0]].name,
        "workload": lambda of: of[1]["workload"],
        "over": lambda of: of[1]["over"],
        "times": lambda of: number(of[1]["here"]),
    }
    return markdown_table(columns, [(c["claim"], ratio) for c in claims for ratio in c["ratios"]])
