"""Simulate MoE-Gen's Fig. 4: what comes over the link for a data set, with the KV cache in host memory or on the GPU.

A batch is simulated for each number of requests up to what the cache in host memory holds; larger data sets are so many
batches of that one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from paper_figures.measuring import MOVED
from paper_figures.moegen.published import FIG4_KV_GB, FIG4_SAVING, OURS
from paper_figures.moegen.rows import Row, computed, find
from paper_figures.moegen.settings import LIMITS, Case
from paper_figures.moegen.text import number
from paper_figures.support import markdown_table, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NOTE = f"Mixtral-8x7B, prompts of 512 tokens, 256 to decode, {FIG4_KV_GB} GB of KV cache; published: MoE-Gen Fig. 4"
SYSTEMS: Mapping[str, str] = {  # where each keeps keys and values
    "MoE-Gen(G)": "host", "MoE-Gen(H)": "host", "MoE-Lens": "host", "MoE-Lightning": "host", "FlexGen": "host",
    "DeepSpeed": "GPU", "vLLM": "GPU", "llama.cpp": "GPU",
}  # fmt: skip
PEER = "DeepSpeed"  # a cache on the GPU, and so a batch that fits it
GPUS = {"C1": "A5000, 24 GB", "C1, A6000": "A6000, 48 GB"}
REQUESTS = (16, 64, 256, 1024)  # one batch of MoE-Gen each; the cache holds 1,271 sequences
DATASETS = (8_500, 116_000)


def cases(
    gpus: Sequence[str] = tuple(GPUS), systems: Sequence[str] = tuple(SYSTEMS), requests: Sequence[int] = REQUESTS
) -> list[Case]:
    return [_case(system, gpu, n) for gpu in gpus for system in systems for n in requests]


def _case(system: str, gpu: str, num_requests: int) -> Case:
    return Case(system=system, setting=gpu, model="mixtral-8x7b", num_requests=num_requests, kv_gb=FIG4_KV_GB)


def compute(chosen: Sequence[Case] | None = None) -> dict[str, Any]:
    return {"label": "simulated", "rows": list(computed(cases() if chosen is None else chosen))}


def dataset_gb(rows: Sequence[Row], system: str, gpu: str, num_requests: int) -> float | None:
    """Return the GB over the link for so many requests; null where the row is missing.

    Batches are as large as the largest that was simulated.
    """
    simulated = max((n for n in REQUESTS if n <= num_requests), default=REQUESTS[0])
    found = find(rows, _case(system, gpu, simulated))
    return found and sum(found["traffic_gb"][what] for what in MOVED) * num_requests / found["sequences"]


def saving(rows: Sequence[Row], ours: str, gpu: str, num_requests: int) -> float | None:
    """Return how many times less comes over the link with one of ours than with DeepSpeed's batches."""
    theirs_gb, ours_gb = (dataset_gb(rows, system, gpu, num_requests) for system in (PEER, ours))
    return theirs_gb / ours_gb if theirs_gb and ours_gb else None


def tables(data: dict[str, Any]) -> str:
    columns: dict[str, Any] = {"GPU": lambda of: GPUS[of[0]], "requests": lambda of: f"{of[1]:,}"}
    for system in SYSTEMS:
        columns[f"{system}, TB"] = lambda of, system=system: number(
            (gb := dataset_gb(data["rows"], system, *of)) and gb / 1e3
        )
    for ours in OURS:
        columns[f"{PEER} / {ours}"] = lambda of, ours=ours: number(saving(data["rows"], ours, *of))
    places = [(gpu, n) for gpu in GPUS for n in (*REQUESTS, *DATASETS)]
    return (
        f"# Traffic to the device for a data set (simulated)\n\n{markdown_table(columns, places)}\n"
        f"Published: up to {FIG4_SAVING:g} times less (section 4.2). {', '.join(_at('GPU'))} keep keys and values on "
        "the GPU, the others in host memory: what these bring of them in every step counts. More than "
        f"{REQUESTS[-1]:,} requests are batches of {REQUESTS[-1]:,}.\n\n{LIMITS}"
    )


def _at(place: str) -> list[str]:
    return [system for system, its in SYSTEMS.items() if its == place]


def draw(data: dict[str, Any]) -> Figure:
    figure = new_figure(8.0, 3.8)
    places = (*REQUESTS, *DATASETS)
    blocks = figure.subplots(1, len(GPUS), sharey=True)
    for axes, (gpu, name) in zip(blocks, GPUS.items(), strict=True):
        for system in SYSTEMS:
            found = [(n, gb / 1e3) for n in places if (gb := dataset_gb(data["rows"], system, gpu, n)) is not None]
            if found:
                style = {"host": "o-", "GPU": "s--"}[SYSTEMS[system]]
                axes.plot(*zip(*found, strict=True), style, markersize=4, label=f"{system}, cache: {SYSTEMS[system]}")
        axes.set(xscale="log", yscale="log", xlabel="requests", title=name)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter("{x:,.10g}")
    blocks[0].set_ylabel("TB over the link")
    figure.legend(*blocks[0].get_legend_handles_labels(), loc="outside upper center", ncols=4)
    return figure
