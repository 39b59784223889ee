"""Compare all systems as PreScope's Figs. 12 and 14 do, and each published gain with what comes out here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

from paper_figures.latency.grid import (
    BATCHES,
    GPUS,
    LLAPOR,
    MODELS,
    PROMPT,
    RECORDED,
    SMALL_MODELS,
    SYSTEMS,
    TRACES,
    Case,
    Row,
    computed,
    find,
)
from paper_figures.latency.published import A100_BATCH_64_TOK_S, GAINS, MOST_GAINED, V100_TOKEN_S, Gain
from paper_figures.support import markdown_table, new_figure, plain_logarithms, with_one_legend

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NOTE = (
    f"prompts of {PROMPT} tokens, 64 generated; routing fitted to small trained models and the gate's hit rates as "
    "recorded of them, or both as in a recorded trace; prescope predicts by the gate as well, and by LLaPor with the "
    "share of tokens of its Table 3 as each expert's chance where that is said; Klotski has two batches of the size; "
    "published: PreScope, Sections 6.2.2 and 6.2.3"
)

RECORDED_BATCHES = (4, 32)
_SAME = ("model", "gpu", "batch", "variant")
_GAINS: dict[str, Callable[[Row, Row], float]] = {  # of the first row over the second
    "throughput": lambda mine, other: mine["tok_s"] / other["tok_s"] - 1,
    "time per token": lambda mine, other: 1 - mine["token_s"] / other["token_s"],
}


def cases(
    models: Sequence[str] = MODELS, gpus: Sequence[str] = tuple(GPUS), batches: Sequence[int] = BATCHES,
    systems: Sequence[str] = SYSTEMS,
) -> list[Case]:  # fmt: skip
    fitted = [
        Case(system=system, model=model, gpu=gpu, batch=batch)
        for model, gpu, batch, system in product(models, gpus, batches, systems)
    ]
    recorded = [
        Case(system=system, model=model, gpu="A100", batch=batch, variant=RECORDED)
        for model, batch, system in product(TRACES, RECORDED_BATCHES, systems)
    ]
    looking_further = [
        Case(system=system, model=model, gpu="A100", batch=batch, variant=SMALL_MODELS)
        for model, batch, system in product(models, RECORDED_BATCHES, ("prescope", "hybrimoe"))
    ]
    return fitted + recorded + looking_further


def compute(chosen: Sequence[Case] | None = None) -> dict[str, Any]:
    return {"label": "simulated", "rows": list(computed(cases() if chosen is None else chosen))}


def tables(data: dict[str, Any]) -> str:
    """Write throughput and time per token by batch, who was busy, and the published gains beside those here."""
    rows = data["rows"]
    found = sorted({(r["variant"], r["model"], r["gpu"]) for r in rows})
    text = "# Systems for small batches (simulated)\n\n" + NOTE + ".\n"
    for variant, model, gpu in found:
        mine = [r for r in rows if (r["variant"], r["model"], r["gpu"]) == (variant, model, gpu)]
        text += f"\n## {model}, {gpu}{variant and f', {variant}'}\n\n"
        text += _by_batch(mine, "tok_s", "tok/s") + "\n"
        text += _by_batch(mine, "token_s", "seconds per output token, in decode") + "\n"
        text += _by_batch(mine, "gap_p99_s", "99th percentile of the seconds between tokens") + "\n"
        text += _busy(mine) + "\n"
    text += "\nWhere experts were is of decode alone, each simulated step as often as it stands for.\n"
    text += "\n## PreScope's gains that are published for one place, in percent\n\n" + gains_by_place(rows)
    return text + "\n## PreScope's largest gains, in percent\n\n" + gains(rows)


def _by_batch(rows: Sequence[Row], fact: str, name: str) -> str:
    """Write a fact of the rows of one model on one machine."""
    model, gpu, variant = (rows[0][field] for field in ("model", "gpu", "variant"))

    def cell(system: str, batch: int) -> str:
        one = find(rows, system=system, batch=batch)
        published = None
        if system == LLAPOR and (gpu, fact) == ("A100", "tok_s") and batch == 64:
            published = A100_BATCH_64_TOK_S.get(model)
        if system == LLAPOR and (gpu, fact) == ("V100", "token_s"):
            published = V100_TOKEN_S.get((model, batch))
        here = "" if one is None else f"{one[fact]:.3g}"
        return here if published is None or variant else f"{here} (published {published:g})"

    batches = sorted({r["batch"] for r in rows})
    columns: dict[str, Any] = {name: str}
    columns |= {str(batch): lambda system, batch=batch: cell(system, batch) for batch in batches}
    return markdown_table(columns, [s for s in SYSTEMS if find(rows, system=s)])


def _busy(rows: Sequence[Row]) -> str:
    """Write, for the smallest and the largest batch, where experts were in decode, and which lanes were busy."""
    batches = sorted({r["batch"] for r in rows})
    chosen = [
        one
        for batch, system in product(sorted({batches[0], batches[-1]}), SYSTEMS)
        if (one := find(rows, system=system, batch=batch)) is not None
    ]

    def share(one: Row, way: str) -> str:
        counted = one["decode_counts"]
        active = counted.get("active", 0)
        return f"{counted[way] / active:.0%}" if active else ""

    columns: dict[str, Any] = {"system": lambda one: one["system"], "batch": lambda one: str(one["batch"])}
    for way in ("resident", "cached", "prefetched", "on_demand", "cpu"):
        columns[way.replace("_", " ")] = lambda one, way=way: share(one, way)
    for lane in ("gpu", "cpu", "h2d"):
        columns[f"{lane} busy"] = lambda one, lane=lane: f"{one['decode']['busy'][lane]:.0%}"
    columns["weights, GB a step"] = lambda one: f"{one['decode']['link_gb']['weights']:.3g}"
    return markdown_table(columns, chosen)


def gains_by_place(rows: Sequence[Row]) -> str:
    """Write each published gain beside that of the same place here, PreScope predicting by LLaPor or by the gate."""

    def here(ours: str, published: Gain) -> str:
        place = {"gpu": published.gpu, "model": published.model, "batch": published.batch, "variant": ""}
        mine, other = (find(rows, system=system, **place) for system in (ours, published.over))
        return "" if mine is None or other is None else f"{100 * _GAINS[published.fact](mine, other):.0f}"

    columns: dict[str, Any] = {
        name: lambda gain, name=name: str(getattr(gain, name)) for name in ("fact", "gpu", "model", "batch", "over")
    }
    columns["published"] = lambda gain: f"{gain.percent:g}"
    columns |= {
        f"here, {how}": lambda gain, ours=ours: here(ours, gain)
        for ours, how in ((LLAPOR, "by LLaPor"), ("prescope", "by the gate"))
    }
    return markdown_table(columns, GAINS)


def gains(rows: Sequence[Row]) -> str:
    """Write the largest gain of PreScope over each system, over all rows that both have.

    PreScope predicts by LLaPor, as published, or by the gate, as the other systems do.
    """

    def most(ours: str, other: str, gain: Callable[[Row, Row], float]) -> str:
        mine = [r for r in rows if r["system"] == ours and "refused" not in r and r["variant"] != SMALL_MODELS]
        both = [(r, find(rows, system=other, **{n: r[n] for n in _SAME})) for r in mine]
        here = [gain(r, dict(found)) for r, found in both if found is not None]
        return f"{100 * max(here):.0f}" if here else ""

    columns: dict[str, Any] = {"over": str}
    for at, (name, gain) in enumerate(_GAINS.items()):
        columns[f"{name}: published"] = lambda system, at=at: f"{MOST_GAINED[system][at]:g}"
        for ours, how in ((LLAPOR, "by LLaPor"), ("prescope", "by the gate")):
            columns[f"{name}: {how}"] = lambda system, ours=ours, gain=gain: most(ours, system, gain)
    return markdown_table(columns, MOST_GAINED)


def draw(data: dict[str, Any]) -> Figure:
    """Draw throughput and seconds per token over the batch: two rows of panels for each machine, a column a model."""
    rows = [r for r in data["rows"] if "refused" not in r and not r["variant"]]
    gpus, models = (sorted({r[name] for r in rows}) for name in ("gpu", "model"))
    facts = {"tok_s": "tok/s", "token_s": "seconds a token"}
    figure = new_figure(3.0 * len(models), 4.4 * len(gpus))
    panels = product(gpus, facts, models)
    for at, (gpu, fact, model) in enumerate(panels, start=1):
        axes = figure.add_subplot(len(gpus) * len(facts), len(models), at)
        for system in SYSTEMS:
            mine = (r for r in rows if (r["system"], r["gpu"], r["model"]) == (system, gpu, model))
            points = sorted((r["batch"], r[fact]) for r in mine)
            axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=system) if points else None
        axes.set(title=f"{model}, {gpu}", xlabel="batch", ylabel=facts[fact], xscale="log", yscale="log")
        plain_logarithms(axes, x=sorted({r["batch"] for r in rows}))
    return with_one_legend(figure)
