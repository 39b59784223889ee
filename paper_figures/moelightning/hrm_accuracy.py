"""Compare MoE-Lightning's performance model (HRM, Eq. 12-14) with the simulator that it predicts: a table and a scatter
plot.

It compares every case of the reports `systems`, `table4` and `table5`, and more policies on S1. Both sides take their
rates from one hardware profile, so what differs is what the model leaves out. One full batch is predicted and one
simulated.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from paper_figures.moelightning.batches import Case, row
from paper_figures.moelightning.systems import HARDWARE, STRATEGIES
from paper_figures.pool import each
from paper_figures.support import REFERENCE, markdown_table, new_figure, read_json

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NOTE = "MoE-Lightning Eq. 12-14; Mixtral-8x7B on T4 and L4; rates of conf/hardware on both sides"
FOLDER = REFERENCE / "moelightning-simulated"
SOURCES = ("systems", "table4", "table5")
SIZES = ((12, 144), (12, 504), (36, 144), (72, 504), (72, 1152))  # mu, N beside those of the other reports


def cases() -> list[Case]:
    """Return more policies: MTBench, padded, g = 128, on S1."""
    return [
        Case(
            system=system, strategy=strategy, setting="S1", hardware=HARDWARE["S1"], g=128, padded=True,
            micro_batch_size=mu, batch_size=n, policy_source="given",
        )
        for system, (strategy, padded) in STRATEGIES.items()
        if padded and strategy != "deepspeed_zero"
        for mu, n in SIZES
    ]  # fmt: skip


def compute(chosen: Sequence[Case] | None = None, folder: Path = FOLDER) -> dict[str, Any]:
    """Compare the rows of the other reports, read from `folder`, and those of `chosen`, which are simulated."""
    reported = [read_json(folder / f"{name}.json")["rows"] for name in SOURCES if (folder / f"{name}.json").exists()]
    rows = [r for rows in reported for r in rows] + list(each(row, cases() if chosen is None else chosen))
    return {"label": "simulated and predicted", "rows": [compared(r) for r in rows if r["predicted"] is not None]}


def compared(row: dict[str, Any]) -> dict[str, Any]:
    """Compare throughputs, and what each phase contributes: the seconds that the batch takes longer than predicted, as
    shares of all its seconds."""
    simulated, predicted = row["simulated"], row["predicted"]
    steps_s = [side["step_s"] * (row["g"] - 1) for side in (simulated, predicted)]
    total_s = simulated["prefill_s"] + steps_s[0]
    kept = ("system", "setting", "dataset", "g", "padded", "policy_source", "planning", "mu", "N")
    return {
        **{name: row[name] for name in kept},
        "sequences": simulated["sequences"],
        "simulated_tok_s": simulated["tok_s"],
        "predicted_tok_s": predicted["tok_s"],
        "accuracy": predicted["accuracy"],
        "late_in_prefill": (simulated["prefill_s"] - predicted["prefill_s"]) / total_s,
        "late_in_decode": (steps_s[0] - steps_s[1]) / total_s,
    }


def by_system(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    found = []
    for system in dict.fromkeys(r["system"] for r in rows):
        mine = [r for r in rows if r["system"] == system]
        worst = min(mine, key=lambda r: r["accuracy"])
        found.append({"system": system, "cases": len(mine), "mean": fmean(r["accuracy"] for r in mine), "worst": worst,
                      "late_in_prefill": fmean(r["late_in_prefill"] for r in mine),
                      "late_in_decode": fmean(r["late_in_decode"] for r in mine)})  # fmt: skip
    return found


def tables(data: dict[str, Any]) -> str:
    rows = data["rows"]
    columns = {
        "system": lambda r: r["system"],
        "cases": lambda r: str(r["cases"]),
        "mean accuracy": lambda r: f"{r['mean']:.1%}",
        "worst": lambda r: f"{r['worst']['accuracy']:.1%}",
        "worst case": lambda r: _case(r["worst"]),
        "later than predicted: prefill": lambda r: f"{r['late_in_prefill']:+.1%}",
        "decode": lambda r: f"{r['late_in_decode']:+.1%}",
    }
    worst = {
        "case": _case,
        "system": lambda r: r["system"],
        "predicted tok/s": lambda r: f"{r['predicted_tok_s']:.4g}",
        "simulated tok/s": lambda r: f"{r['simulated_tok_s']:.4g}",
        "accuracy": lambda r: f"{r['accuracy']:.1%}",
        "N planned": lambda r: f"{r['N']:,}",
        "in the batch": lambda r: f"{r['sequences']:,}",
        "later: prefill": lambda r: f"{r['late_in_prefill']:+.1%}",
        "decode": lambda r: f"{r['late_in_decode']:+.1%}",
    }
    ranked = sorted(rows, key=lambda r: r["accuracy"])
    mean = fmean(r["accuracy"] for r in rows)
    return (
        f"# HRM against the simulator\n\nMean accuracy (1 - |predicted - simulated| / simulated) {mean:.1%} over "
        f"{len(rows)} cases.\n\n{markdown_table(columns, by_system(rows))}\n"
        f"## The ten worst\n\n{markdown_table(worst, ranked[:10])}"
    )


def _case(r: dict[str, Any]) -> str:
    return f"{r['setting']} {r['dataset']} g {r['g']}, μ {r['mu']}, N {r['N']:,}"


def draw(data: dict[str, Any]) -> Figure:
    figure = new_figure(5.6, 5.0)
    axes = figure.subplots()
    for number, system in enumerate(dict.fromkeys(r["system"] for r in data["rows"])):
        mine = [r for r in data["rows"] if r["system"] == system]
        axes.plot([r["simulated_tok_s"] for r in mine], [r["predicted_tok_s"] for r in mine], "osD^v*"[number % 6],
                  markersize=4.5, alpha=0.8, label=system)  # fmt: skip
    values = [r[name] for r in data["rows"] for name in ("simulated_tok_s", "predicted_tok_s")]
    low, high = min(values) / 1.2, max(values) * 1.2
    axes.plot([low, high], [low, high], color="0.4", linewidth=0.8)
    axes.fill_between([low, high], [0.8 * low, 0.8 * high], [1.2 * low, 1.2 * high], color="0.5", alpha=0.12,
                      label="within 20 %")  # fmt: skip
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high))
    axes.set(xlabel="simulated tok/s", ylabel="predicted tok/s (HRM)")
    axes.legend(loc="upper left")
    return figure
