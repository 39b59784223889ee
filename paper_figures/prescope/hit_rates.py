"""Ask what a worse predictor costs: PreScope over the stated hit rate, at the paper's scale.

All else stays, the table of hot experts included. The rate is every expert's chance to be foreseen, one layer ahead.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import TYPE_CHECKING, Any

from paper_figures.prescope.cases import Case, computed, find
from paper_figures.support import markdown_table, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NOTE = (
    "prompts of 512 tokens, 64 to generate; 7 steps simulated, those between interpolated; routing drawn by a Zipf law "
    "with exponent 1"
)
STATED = (1.0, 0.8, 0.6, 0.4, 0.2, 0.0)
# GPU, model, batch, and device memory in GB: of the small models 22, with which three of five experts have room
PLACES = (
    ("V100", "mixtral-8x7b", 64, 32), ("A100", "mixtral-8x7b", 64, 32), ("A100", "qwen3-30b-a3b", 64, 32),
    ("A100", "moonlight-16b-a3b", 32, 22), ("A100", "deepseek-v2-lite", 64, 22),
)  # fmt: skip
Place = tuple[str, str, int, int]
Row = Mapping[str, Any]


def case(place: Place, stated: float) -> Case:
    gpu, model, batch, memory_gb = place
    more = (f"hardware.device_memory_gb={memory_gb}", f"routing.hit_rates=[[{stated}]]")
    return Case(
        system="PreScope", gpu=gpu, model=model, batch=batch, variant=f"{memory_gb} GB, hits {stated}", more=more
    )


def compute() -> dict[str, Any]:
    cases = [case(place, stated) for place, stated in product(PLACES, STATED)]
    return {"label": "simulated", "rows": computed("hit-rates", cases)}


def _row(data: Mapping[str, Any], place: Place, stated: float) -> Row | None:
    wanted = case(place, stated)
    return find(data["rows"], wanted.system, wanted.gpu, wanted.model, wanted.batch, wanted.variant)


def _there(row: Row) -> float:
    """Return the share of the active experts of decode that a prefetch had brought."""
    return float(row["decode_counts"]["prefetched"] / row["decode_counts"]["active"])


def tables(data: Mapping[str, Any]) -> str:
    def cell(place: Place, stated: float) -> str:
        found = _row(data, place, stated)
        if found is None:
            return "-"
        wasted_gb = found["decode_counts"]["wasted_bytes"] / 1e9
        link = found["decode"]["busy"]["h2d"]
        return f"{found['tok_s']:.4g}: {_there(found):.1%}, {wasted_gb:.3g} GB, {link:.0%}"

    columns: dict[str, Any] = {"GPU, model, batch, GB": lambda place: ", ".join(map(str, place))}
    for stated in STATED:
        columns[f"hits {stated:.0%}"] = lambda place, stated=stated: cell(place, stated)
    return (
        "# PreScope over the stated hit rate (simulated)\n\n"
        "tok/s over both phases: share of the active experts of decode that a prefetch had brought, bytes of "
        "prefetches that nobody used, and how busy the link is in decode.\n\n"
        f"{markdown_table(columns, PLACES)}"
    )


def draw(data: Mapping[str, Any]) -> Figure:
    """Draw throughput and hits beside each other, each over that of the right prediction."""
    figure = new_figure(8.0, 3.2)
    speed, hits = figure.subplots(1, 2)
    for place in PLACES:
        found = [(stated, each) for stated in STATED if (each := _row(data, place, stated))]
        if not found or found[0][0] != STATED[0]:
            continue
        rates, rows = zip(*found, strict=True)
        label = f"{place[1]}, {place[0]}, batch {place[2]}"
        speed.plot(rates, [r["tok_s"] / rows[0]["tok_s"] for r in rows], "o-", markersize=3, label=label)
        hits.plot(rates, [_there(r) for r in rows], "o-", markersize=3)
    speed.set(xlabel="stated hit rate", ylabel="throughput / with all foreseen")
    hits.set(xlabel="stated hit rate", ylabel="active experts prefetched", ylim=(0, None))
    hits.yaxis.set_major_formatter(lambda share, _: f"{100 * share:g}%")
    figure.legend(*speed.get_legend_handles_labels(), loc="outside upper center", ncols=2, fontsize=7)
    return figure
