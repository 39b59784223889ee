"""Ask when a cache is enough, when prefetching pays, and when the CPU is the better place for experts.

One model runs over link rate, batch and memory for experts, under four systems: `expert_cache` keeps experts, `fate`
keeps and prefetches, `fiddler` keeps and computes on the CPU, `hybrimoe` does all three.
"""

from __future__ import annotations

from collections.abc import Sequence
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
SYSTEMS = ("expert_cache", "fate", "fiddler", "hybrimoe")


def cases() -> list[Case]:
    return [
        Case(
            system=system, model=MODEL, gpu=GPU, batch=batch, variant=f"{link} GB/s, {memory} GB",
            more=(f"hardware.h2d_gb_s={link}", f"hardware.device_memory_gb={memory}"),
        )
        for link, batch, memory, system in product(LINKS_GB_S, BATCHES, MEMORIES_GB, SYSTEMS)
    ]  # fmt: skip


def compute(chosen: Sequence[Case] | None = None) -> dict[str, Any]:
    return {"label": "simulated", "rows": computed(cases() if chosen is None else chosen)}


def _token_s(data: dict[str, Any], system: str, batch: int, link: int, memory: int) -> float | None:
    one = find(data["rows"], system=system, batch=batch, variant=f"{link} GB/s, {memory} GB")
    return None if one is None else float(one["token_s"])


def tables(data: dict[str, Any]) -> str:
    """Write seconds per output token; the best of each line is the answer there."""
    lines = [
        key for key in product(BATCHES, MEMORIES_GB, LINKS_GB_S) if any(_token_s(data, s, *_of(key)) for s in SYSTEMS)
    ]

    def cell(system: str, key: tuple[int, int, int]) -> str:
        times = {each: _token_s(data, each, *_of(key)) for each in SYSTEMS}
        found = times[system]
        best = min((value for value in times.values() if value is not None), default=None)
        return "" if found is None else f"**{found:.3g}**" if found == best else f"{found:.3g}"

    columns: dict[str, Any] = {
        "batch": lambda key: str(key[0]), "memory GB": lambda key: str(key[1]), "link GB/s": lambda key: str(key[2]),
    }  # fmt: skip
    columns |= {system: lambda key, system=system: cell(system, key) for system in SYSTEMS}
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
        for system in SYSTEMS:
            points = [
                (link, s) for link in LINKS_GB_S if (s := _token_s(data, system, batch, link, memory)) is not None
            ]
            axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=system) if points else None
        axes.set(
            title=f"batch {batch}, {memory} GB", xlabel="link GB/s", ylabel="s a token", xscale="log", yscale="log"
        )
        plain_logarithms(axes, x=LINKS_GB_S)
    return with_one_legend(figure)
