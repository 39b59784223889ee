"""Ask what a worse predictor costs: PreScope over the stated hit rate, at the paper's scale.

All else stays, the table of hot experts included. The rate is every expert's chance to be foreseen, one layer ahead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

from paper_figures.prescope.cases import Case, find
from paper_figures.support import markdown_table, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NOTE = (
    "prompts of 512 tokens, 64 to generate; 7 steps simulated, those between interpolated; routing drawn by a Zipf law "
    "with exponent 1"
)
STATED = (1.0, 0.8, 0.6, 0.4, 0.2, 0.0)
PCIE5_GB_S = (49.8, 63.0)  # 79 % of the link, as both GPUs reach of theirs, and its peak
# GPU, model, batch, device memory in GB, and the link in GB/s where it is not the GPU's own.
# Large batches, whose link is busy most of the time. Of the small models 22 GB, with which three of five experts have
# room.
BUSY = (
    ("V100", "mixtral-8x7b", 64, 32, None), ("A100", "mixtral-8x7b", 64, 32, None),
    ("A100", "qwen3-30b-a3b", 64, 32, None), ("A100", "moonlight-16b-a3b", 32, 22, None),
    ("A100", "deepseek-v2-lite", 64, 22, None),
)  # fmt: skip
# Smaller batches of the model that has most experts away, and a faster link: it has a fifth of the time left or more.
WITH_TIME_LEFT = (
    ("V100", "mixtral-8x7b", 16, 32, None), ("A100", "mixtral-8x7b", 8, 32, None),
    ("A100", "mixtral-8x7b", 4, 32, PCIE5_GB_S), ("A100", "mixtral-8x7b", 32, 32, PCIE5_GB_S),
)  # fmt: skip
PLACES = (*BUSY, *WITH_TIME_LEFT)
Place = tuple[str, str, int, int, tuple[float, float] | None]
Row = Mapping[str, Any]


def case(place: Place, stated: float) -> Case:
    gpu, model, batch, memory_gb, link = place
    more = [f"hardware.device_memory_gb={memory_gb}", f"routing.hit_rates=[[{stated}]]"]
    if link is not None:
        more += [f"hardware.h2d_gb_s={link[0]}", f"hardware.h2d_peak_gb_s={link[1]}"]
    variant = f"{memory_gb} GB, hits {stated}" + (f", link {link[0]} GB/s" if link else "")
    return Case(system="PreScope", gpu=gpu, model=model, batch=batch, variant=variant, more=tuple(more))


def wanted() -> list[Case]:
    return [case(place, stated) for place, stated in product(PLACES, STATED)]


def _row(data: Mapping[str, Any], place: Place, stated: float) -> Row | None:
    of = case(place, stated)
    return find(data["rows"], of.system, of.gpu, of.model, of.batch, of.variant)


def _there(row: Row) -> float:
    """Return the share of the active experts of decode that a prefetch had brought."""
    return float(row["decode_counts"]["prefetched"] / row["decode_counts"]["active"])


def _named(place: Place) -> str:
    gpu, model, batch, memory_gb, link = place
    return f"{gpu}, {model}, {batch}, {memory_gb} GB" + (f", link {link[0]} GB/s" if link else "")


def tables(data: Mapping[str, Any]) -> str:
    columns: dict[str, Any] = {
        "GPU, model, batch, memory": lambda at: _named(at[0]),
        "hits": lambda at: f"{at[1]:.0%}",
        "tok/s": lambda at: f"{at[2]['tok_s']:.4g}",
        "prefill, s": lambda at: f"{at[2]['prefill_s']:.4g}",
        "decode, ms a token": lambda at: f"{1e3 * at[2]['token_s']:.4g}",
        "prefetched": lambda at: f"{_there(at[2]):.1%}",
        "on demand": lambda at: f"{at[2]['decode_counts']['on_demand'] / at[2]['decode_counts']['active']:.1%}",
        "wasted, GB": lambda at: f"{at[2]['decode_counts']['wasted_bytes'] / 1e9:.3g}",
        "link busy": lambda at: f"{at[2]['decode']['busy']['h2d']:.0%}",
        "CPU busy": lambda at: f"{at[2]['decode']['busy']['cpu']:.0%}",
    }

    def part(places: Sequence[Place]) -> str:
        found = [(place, stated, row) for place in places for stated in STATED if (row := _row(data, place, stated))]
        return markdown_table(columns, found)

    return (
        "# PreScope over the stated hit rate (simulated)\n\n"
        "tok/s are over both phases. Of decode alone are the milliseconds of a token, the shares of its active experts "
        "that a prefetch had brought and that came on demand, the bytes of prefetches that nobody used, and how busy "
        "link and CPU are.\n\n"
        f"## The link is busy most of the time\n\n{part(BUSY)}\n"
        f"## The link has time left\n\n{part(WITH_TIME_LEFT)}"
    )


def draw(data: Mapping[str, Any]) -> Figure:
    """Draw the speed of both phases and of decode alone, each over that of the right prediction, and the hits."""
    figure = new_figure(11.0, 4.2)
    speed, decode, hits = figure.subplots(1, 3)
    decode.sharey(speed)
    for number, place in enumerate(PLACES):
        found = [(stated, each) for stated in STATED if (each := _row(data, place, stated))]
        if not found or found[0][0] != STATED[0]:
            continue
        rates, rows = zip(*found, strict=True)
        look = {
            "marker": "o",
            "markersize": 3,
            "color": f"C{number}",
            "linestyle": "-" if place in WITH_TIME_LEFT else ":",
        }
        speed.plot(rates, [r["tok_s"] / rows[0]["tok_s"] for r in rows], label=_named(place), **look)
        decode.plot(rates, [rows[0]["token_s"] / r["token_s"] for r in rows], **look)
        hits.plot(rates, [_there(r) for r in rows], **look)
    speed.set(xlabel="stated hit rate", ylabel="tok/s / with all foreseen", title="prefill and decode")
    decode.set(xlabel="stated hit rate", ylabel="tok/s / with all foreseen", title="decode alone")
    hits.set(xlabel="stated hit rate", ylabel="active experts prefetched", ylim=(0, None), title="decode alone")
    hits.yaxis.set_major_formatter(lambda share, _: f"{100 * share:g}%")
    legend = "solid: the link has time left; dotted: it is busy most of the time"
    handles = speed.get_legend_handles_labels()
    figure.legend(*handles, loc="outside upper center", ncols=3, fontsize=7, title=legend, title_fontsize=7)
    return figure
