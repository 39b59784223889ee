"""Ask when a cache is enough, when prefetching pays, and when the CPU is the better place for experts.

One model runs over link rate, batch and memory for experts. `expert_cache` keeps experts alone, with LRU, LFU or ARC;
`fate` and `hybrimoe` are there with and without their prefetches, so that each pair differs in these alone; `fiddler`,
`hybrimoe` and `prescope` compute on the CPU as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

from paper_figures.latency.grid import Case, computed, find
from paper_figures.support import markdown_table, new_figure, plain_logarithms, with_one_legend

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NOTE = "DeepSeek-V2-Lite on an A100 whose link and memory are changed; prompts of 512 tokens, 64 generated"
MODEL, GPU = "deepseek-v2-lite", "A100"
LINKS_GB_S = (6, 12, 25, 50)
BATCHES = (4, 32)
MEMORIES_GB = (10, 20, 30)
NO_PREFETCH = ("strategy.predictor=none",)
ONE_AHEAD = "routing.hit_rates=[[0.85]]"  # the gate's, as recorded; all systems see one layer ahead here
WAYS: Mapping[tuple[str, str], tuple[str, ...]] = {  # (system, what is changed in it) -> overrides
    ("expert_cache", ""): (),
    ("expert_cache", "LFU"): ("strategy.policy=lfu",),
    ("expert_cache", "ARC"): ("strategy.policy=arc",),
    ("fate", "no prefetch"): NO_PREFETCH,
    ("fate", ""): (),
    ("fiddler", ""): (),
    ("hybrimoe", "no prefetch"): NO_PREFETCH,
    ("hybrimoe", ""): (),
    ("prescope", ""): (),
}
SYSTEMS = tuple(dict.fromkeys(system for system, _ in WAYS))  # by their colour
_DASHES = {"": "-", "ARC": ":"}  # others are dashed
NAMES = {way: ", ".join(filter(None, way)) for way in WAYS}


def cases() -> list[Case]:
    return [
        Case(
            system=way[0], model=MODEL, gpu=GPU, batch=batch, variant=_variant(way, link, memory),
            more=(f"hardware.h2d_gb_s={link}", f"hardware.device_memory_gb={memory}", ONE_AHEAD, *WAYS[way]),
        )
        for link, batch, memory, way in product(LINKS_GB_S, BATCHES, MEMORIES_GB, WAYS)
    ]  # fmt: skip


def _variant(way: tuple[str, str], link: int, memory: int) -> str:
    return ", ".join(filter(None, (f"{link} GB/s", f"{memory} GB", way[1])))


def compute(chosen: Sequence[Case] | None = None) -> dict[str, Any]:
    return {"label": "simulated", "rows": list(computed(cases() if chosen is None else chosen))}


def _token_s(data: dict[str, Any], way: tuple[str, str], batch: int, link: int, memory: int) -> float | None:
    one = find(data["rows"], system=way[0], batch=batch, variant=_variant(way, link, memory))
    return None if one is None else float(one["token_s"])


def tables(data: dict[str, Any]) -> str:
    """Write seconds per output token; the best of each line is the answer there."""
    lines = [
        key for key in product(BATCHES, MEMORIES_GB, LINKS_GB_S) if any(_token_s(data, w, *_of(key)) for w in WAYS)
    ]

    def cell(way: tuple[str, str], key: tuple[int, int, int]) -> str:
        times = {each: _token_s(data, each, *_of(key)) for each in WAYS}
        found = times[way]
        best = min((value for value in times.values() if value is not None), default=None)
        return "" if found is None else f"**{found:.3g}**" if found == best else f"{found:.3g}"

    columns: dict[str, Any] = {
        "batch": lambda key: str(key[0]), "memory GB": lambda key: str(key[1]), "link GB/s": lambda key: str(key[2]),
    }  # fmt: skip
    columns |= {NAMES[way]: lambda key, way=way: cell(way, key) for way in WAYS}
    return (
        f"# Cache, prefetch or CPU: seconds per output token (simulated)\n\n{NOTE}.\n\n{markdown_table(columns, lines)}"
    )


def _of(key: tuple[int, int, int]) -> tuple[int, int, int]:
    batch, memory, link = key
    return batch, link, memory


def draw(data: dict[str, Any]) -> Figure:
    """Draw seconds per token over the link's rate, a panel for each batch and size of memory."""
    figure = new_figure(9, 5)
    for at, (batch, memory) in enumerate(product(BATCHES, MEMORIES_GB), start=1):
        axes = figure.add_subplot(len(BATCHES), len(MEMORIES_GB), at)
        for way in WAYS:
            points = [(link, s) for link in LINKS_GB_S if (s := _token_s(data, way, batch, link, memory)) is not None]
            if points:
                drawn = axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=NAMES[way])
                drawn[0].set(linestyle=_DASHES.get(way[1], "--"), color=f"C{SYSTEMS.index(way[0])}")
        axes.set(
            title=f"batch {batch}, {memory} GB", xlabel="link GB/s", ylabel="s a token", xscale="log", yscale="log"
        )
        plain_logarithms(axes, x=LINKS_GB_S)
    return with_one_legend(figure)
