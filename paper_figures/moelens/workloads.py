"""Simulate MoE-Lens over MoE-Lightning on all models and workloads of its Figs. 11 and 12, and with early ends (EOS).

    python -m paper_figures.moelens.workloads --missing                       # rows that are not there yet
    python -m paper_figures.moelens.workloads --model dbrx --dataset rag12000 # these again

Runs of MoE-Lens that `paper_figures.moelens.simulate` has made by the same code are taken from there.
MoE-Lightning is as built: its artifact's planner and one thread that stages weights, on the better of the two hosts of
section 7; of one full batch, some of whose decode steps are simulated. MoE-Lens runs the paper's number of requests to
its end. `EOS` is MoE-Lens alone with answers that end by themselves, as in section 8.1; how long they are is not
published, and assumed here.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Any

from harness.cli.arguments import CommandParser
from harness.cli.overrides import made_folder
from harness.interrupts import exit_code
from harness.record.provenance import code_version
from paper_figures.moelens.simulate import BLOCK_TOKENS, GENERATION_LENGTHS, KV_CACHES_GB, name_of, whole_run
from paper_figures.moelens.simulated import FOLDER
from paper_figures.moelens.speed_up import full_batches
from paper_figures.passes import planned, simulated_passes
from paper_figures.pool import each
from paper_figures.reports import made_by
from paper_figures.support import markdown_table, read_json, write_json
from strategies.moelens.equations import prefills_per_pass

MODELS = {"mixtral-8x7b": 16, "mixtral-8x22b": 24, "dbrx": 24}  # GB of the A40 that section 7 leaves
DATASETS = {"mtbench": GENERATION_LENGTHS, "rag12000": (128,), "aime2024": (512,)}  # Table 3
LENS, LENS_EOS, LIGHTNING = SYSTEMS = ("MoE-Lens", "MoE-Lens, EOS", "MoE-Lightning, as built")
ANSWERS = "{mean: 200, max: 2048, source: 'assumed: no paper says how long these answers are'}"  # tokens
PUBLISHED = {  # mean and largest speed-up over MoE-Lightning, section 8.1
    ("mtbench", 70): (3.2, None), ("mtbench", 210): (6.4, 12.4), ("rag12000", None): (19.4, 25.5),
    ("aime2024", None): (4.7, 9.9),
}  # fmt: skip
_FIELDS = ("model", "dataset", "g", "kv_cache_gb", "system")
Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One system on one model, workload and KV cache."""

    model: str
    dataset: str
    g: int
    kv_cache_gb: float
    system: str

    @property
    def key(self) -> tuple[object, ...]:
        """The fields by which a row is found again."""
        return tuple(getattr(self, name) for name in _FIELDS)

    @property
    def overrides(self) -> list[str]:
        """The overrides that both systems share, as `python -m harness.plan` takes them."""
        return [
            *(f"model={self.model}", "hardware=a40", f"hardware.device_memory_gb={MODELS[self.model]}"),
            *(f"dataset={self.dataset}", "dataset.synthetic=lengths", f"dataset.max_new_tokens={self.g}"),
            *(f"kv_cache_gb={self.kv_cache_gb:g}", "strategy.packet_mb=100"),
        ]


def cases() -> list[Case]:
    """Return all cells of Figs. 11 and 12; EOS is simulated where answers have room for it, from 128 tokens on."""
    found = []
    for model, (dataset, lengths), kv_gb in product(MODELS, DATASETS.items(), KV_CACHES_GB):
        for g, system in product(lengths, SYSTEMS):
            if system != LENS_EOS or (dataset == "mtbench" and g >= 128):
                found.append(Case(model=model, dataset=dataset, g=g, kv_cache_gb=kv_gb, system=system))
    return found


def row(case: Case) -> Row:
    """Simulate a case; rates in generated tokens a second."""
    found = _moelightning(case) if case.system == LIGHTNING else _moelens(case)
    return {**dict(zip(_FIELDS, case.key, strict=True)), **found, "code": code_version()}


def _moelens(case: Case) -> Row:
    given = ["strategy=moelens", *case.overrides]
    probe = planned([*given, "dataset.num_requests=1"])
    statistics = probe.settings.dataset.lengths
    assert statistics is not None
    num_blocks = int(case.kv_cache_gb * 1e9) // (BLOCK_TOKENS * probe.engine.spec.kv_bytes_per_token)
    q = prefills_per_pass(statistics.mean, case.g, num_blocks=num_blocks, block_size=BLOCK_TOKENS)
    number = round(5 * case.g * q)
    if case.dataset == "mtbench" and case.kv_cache_gb == 70:  # section 7
        number = 25_000 if case.g == 32 else 20_000
    given.append(f"dataset.num_requests={number}")
    if case.system == LENS_EOS:
        given.append(f"dataset.output_lengths={ANSWERS}")
    plan = planned(given)
    return whole_run(plan, simulated_passes(plan), f"python -m harness.plan {' '.join(given)}")


def simulated_whole(case: Case, folder: Path) -> Row | None:
    """Return the row of a run that `simulate` has kept in the folder, by this very code; None where there is none."""
    path = folder / f"{name_of(case.kv_cache_gb, case.g)}.json"
    if (case.model, case.dataset, case.system) != ("mixtral-8x7b", "mtbench", LENS) or not path.exists():
        return None
    run = read_json(path)
    is_whole = run["setting"]["num_requests"] == run["setting"]["paper_num_requests"]
    if run["code"] != code_version() or not is_whole or "whole" not in run:
        return None
    return {**dict(zip(_FIELDS, case.key, strict=True)), **run["whole"], "code": run["code"]}


def _moelightning(case: Case) -> Row:
    """Simulate the better of the policies that both hosts get."""
    found = full_batches(["strategy=moelightning", "strategy.planning=as_built", *case.overrides])
    best = max(found, key=lambda made: float(made["tok_s"]))
    return {
        **{name: best[name] for name in ("tok_s", "mu", "host", "command")},
        "requests": best["N"], "requests_s": best["tok_s"] / case.g, "busy": best["decode_busy"],
    }  # fmt: skip


def tables(data: Mapping[str, Any]) -> str:
    """Write throughputs and speed-ups, and their means beside the published ones."""
    by_key = {tuple(r[name] for name in _FIELDS): r for r in data["rows"]}
    cells = list(dict.fromkeys(tuple(r[name] for name in _FIELDS[:-1]) for r in data["rows"]))

    def rate(cell: tuple[Any, ...], system: str, name: str = "tok_s") -> float | None:
        found = by_key.get((*cell, system))
        return None if found is None else float(found[name])

    def ratio(cell: tuple[Any, ...], system: str, name: str = "tok_s") -> float | None:
        ours, theirs = rate(cell, system, name), rate(cell, LIGHTNING, name)
        return ours / theirs if ours and theirs else None

    def told(value: float | None) -> str:
        return "" if value is None else f"{value:.3g}" if value < 100 else f"{value:,.0f}"

    columns: dict[str, Any] = {
        name: lambda c, at=at: f"{c[at]:g}" if at > 1 else c[at] for at, name in enumerate(_FIELDS[:-1])
    }
    columns |= {f"{system}, tok/s": lambda c, system=system: told(rate(c, system)) for system in SYSTEMS}
    columns |= {
        "N of MoE-Lightning": lambda c: told(rate(c, LIGHTNING, "requests")),
        "predicted of MoE-Lens": lambda c: told(rate(c, LENS, "predicted_tok_s")),
        "speed-up": lambda c: told(ratio(c, LENS)),
        "EOS, tok/s": lambda c: told(ratio(c, LENS_EOS)),
        "EOS, requests/s": lambda c: told(ratio(c, LENS_EOS, "requests_s")),
    }
    groups = list(PUBLISHED.items())

    def of_group(key: tuple[str, int | None]) -> list[float]:
        mine = [c for c in cells if c[1] == key[0] and key[1] in (None, c[3])]
        return [found for c in mine if (found := ratio(c, LENS)) is not None]

    averages: dict[str, Any] = {
        "workload": lambda g: g[0][0],
        "KV GB": lambda g: str(g[0][1] or "both"),
        "cells": lambda g: str(len(of_group(g[0]))),
        "mean": lambda g: told(fmean(of_group(g[0])) if of_group(g[0]) else None),
        "geometric": lambda g: told(geometric_mean(of_group(g[0])) if of_group(g[0]) else None),
        "largest": lambda g: told(max(of_group(g[0]), default=None)),
        "published mean": lambda g: f"{g[1][0]:g}",
        "published largest": lambda g: "" if g[1][1] is None else f"{g[1][1]:g}",
    }
    return (
        "# MoE-Lens over MoE-Lightning as built, all models and workloads (simulated)\n\n"
        "An A40 with 16 GB (Mixtral-8x7B) or 24 GB, synthetic prompts of published lengths. EOS: answers end after "
        f"lengths drawn from {ANSWERS}, cut at g.\n\n{markdown_table(averages, groups)}\n"
        f"{markdown_table(columns, cells)}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = CommandParser("paper_figures.moelens.workloads", __doc__)
    parser.add_argument("--model", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--dataset", nargs="+", choices=list(DATASETS), default=list(DATASETS))
    parser.add_argument("--kv", nargs="+", type=int, choices=KV_CACHES_GB, default=list(KV_CACHES_GB))
    parser.add_argument("--missing", action="store_true", help="only rows that are not there yet")
    parser.add_argument("--out", type=Path, default=FOLDER, metavar="FOLDER", help="rows that are there are kept")
    return parser.run(_simulate, arguments)


def _simulate(given: Namespace) -> int:
    path = made_folder("--out", str(given.out)) / "workloads.json"
    by_key = {tuple(r[name] for name in _FIELDS): r for r in (read_json(path)["rows"] if path.exists() else [])}
    every = cases()
    named = [c for c in every if c.model in given.model and c.dataset in given.dataset and c.kv_cache_gb in given.kv]
    asked = [c for c in named if not (given.missing and c.key in by_key)]
    asked.sort(key=lambda case: case.system == LIGHTNING)  # the longest first, so that no core waits for the last
    kept = {case.key: found for case in asked if (found := simulated_whole(case, path.parent))}
    rows_made = each(row, [case for case in asked if case.key not in kept])
    for case in asked:
        by_key[case.key] = found = kept.get(case.key) or next(rows_made)
        print(*case.key, f"{found['tok_s']:.4g} tok/s", flush=True)
        head = made_by("python -m paper_figures.moelens.workloads --missing")
        rows = [by_key[c.key] for c in every if c.key in by_key]
        write_json(path, {**head, "label": "simulated", "rows": rows})
    data = read_json(path)
    path.with_suffix(".md").write_text(tables(data), encoding="utf-8")
    print(tables(data))
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
