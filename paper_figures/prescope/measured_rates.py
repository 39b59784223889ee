"""Simulate PreScope with hit rates by layer and rank that were measured on small models, beside Table 3's share.

Table 3's share is of the tokens of a batch's hottest experts. The other reports take it as every expert's chance.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from paper_figures.prescope.cases import BATCHES, GPUS, Case, all_cases, find
from paper_figures.support import markdown_table

MEASURED = "measured rates"
_ALONE = "without LLaPor"
_FOLDER = "results/reference/prescope-prediction"  # from the repository's root, as commands name it
# Small models with as many experts a token
RATES = {
    "mixtral-8x7b": f"{_FOLDER}/mixtral-hit-rates.json",
    "deepseek-v2-lite": f"{_FOLDER}/deepseek-hit-rates.json",
    "moonlight-16b-a3b": f"{_FOLDER}/deepseek-hit-rates.json",
    "qwen3-30b-a3b": f"{_FOLDER}/qwen3-hit-rates.json",
}


def measured(case: Case) -> Case:
    """Return the case with the measured rates of its model in place of the stated one."""
    more = ("routing.hit_rates=null", f"routing.hit_rates_path={RATES[case.model]}")
    return replace(case, variant=MEASURED, more=more)


def wanted() -> list[Case]:
    stated = [case for case in all_cases(("PreScope", _ALONE)) if case.model in RATES]
    return [*stated, *(measured(case) for case in stated if case.system == "PreScope")]


def tables(data: dict[str, Any]) -> str:
    def cell(of: tuple[str, str], batch: int) -> str:
        case = Case(system="PreScope", gpu=of[0], model=of[1], batch=batch)
        three = (measured(case), case, replace(case, system=_ALONE))
        found = [find(data["rows"], c.system, c.gpu, c.model, c.batch, c.variant) for c in three]
        if not all(found):
            return "-"
        ours, *others = [each["tok_s"] for each in found if each]
        return f"{ours:.3g}: " + ", ".join(f"{ours / other - 1:+.1%}" for other in others)

    columns: dict[str, Any] = {"GPU, model": ", ".join}
    for batch in BATCHES:
        columns[f"batch {batch}"] = lambda of, batch=batch: cell(of, batch)
    return (
        "# PreScope with measured rates (simulated)\n\n"
        "tok/s with the hit rates of LLaPor on a small model, by layer and rank, and how much more that is than with "
        "Table 3's share as every expert's chance, and than without LLaPor. A layer takes the rates of the same depth; "
        "those at the depth of the small model's first layer, which has no predictor, are not predicted.\n\n"
        f"{markdown_table(columns, [(gpu, model) for gpu in GPUS for model in RATES])}"
    )
