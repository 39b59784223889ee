"""Simulate PreScope's Figs. 5 and 12 to 14: throughput and seconds per output token beside other systems, and what an
expert takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from paper_figures.prescope.cases import BATCHES, GPUS, MODELS, OTHERS, all_cases, computed, find
from paper_figures.prescope.published import CPU_EXPERT_MS, LATENCY_V100, THROUGHPUT_A100_64
from paper_figures.support import markdown_table, new_figure, plain_logarithms, with_one_legend

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SYSTEMS = ("PreScope", *OTHERS)


def compute() -> dict[str, Any]:
    return {"label": "simulated", "rows": computed("throughput", all_cases(SYSTEMS))}


def tables(data: dict[str, Any]) -> str:
    rows = data["rows"]
    parts = ["# PreScope, Fig. 12: tok/s, and published in brackets (simulated)\n"]
    parts += [_table(rows, gpu, model) for gpu in GPUS for model in MODELS]
    return "\n".join([*parts, _latency(rows), _overheads(rows)])


def _table(rows: Sequence[dict[str, Any]], gpu: str, model: str) -> str:
    def cell(system: str, batch: int) -> str:
        found = find(rows, system, gpu, model, batch)
        text = f"{found['tok_s']:.3g}" if found else "-"
        published = THROUGHPUT_A100_64.get(model) if (gpu, batch, system) == ("A100", 64, "PreScope") else None
        return text if published is None else f"{text} ({published:g})"

    columns: dict[str, Any] = {"system": str}
    for batch in BATCHES:
        columns[str(batch)] = lambda system, batch=batch: cell(system, batch)
    columns["active experts in decode, batch 64"] = lambda system: _hits(rows, system, gpu, model)
    seconds: dict[str, Any] = {"seconds per output token": str}
    for batch in BATCHES:
        seconds[str(batch)] = lambda system, batch=batch: (
            f"{found['token_s']:.3g}" if (found := find(rows, system, gpu, model, batch)) else "-"
        )
    seconds["to the first, batch 64"] = lambda system: (
        f"{found['prefill_s']:.3g}" if (found := find(rows, system, gpu, model, 64)) else "-"
    )
    seconds["busy in decode, batch 64"] = lambda system: _busy(rows, system, gpu, model)
    return (
        f"## {gpu}, {model}\n\n{markdown_table(columns, SYSTEMS)}\n{markdown_table(seconds, SYSTEMS)}\n"
        f"{_refused(rows, gpu, model)}"
    )


def _busy(rows: Sequence[dict[str, Any]], system: str, gpu: str, model: str) -> str:
    found = find(rows, system, gpu, model, 64)
    return ", ".join(f"{lane} {found['decode']['busy'][lane]:.0%}" for lane in ("gpu", "cpu", "h2d")) if found else "-"


def _refused(rows: Sequence[dict[str, Any]], gpu: str, model: str) -> str:
    mine = [r for r in rows if (r["gpu"], r["model"]) == (gpu, model) and "refused" in r]
    return "".join(f"* {r['system']}, batch {r['batch']}: {r['refused'].splitlines()[0]}\n" for r in mine)


def _hits(rows: Sequence[dict[str, Any]], system: str, gpu: str, model: str) -> str:
    """Tell where active experts of all steps of decode were, and the bytes of prefetches that came to nothing."""
    found = find(rows, system, gpu, model, 64)
    if not found or not (counted := found.get("decode_counts")):
        return "-"
    of = {way: counted[way] / counted["active"] for way in ("resident", "prefetched", "on_demand", "cpu")}
    ways = ", ".join(f"{way.replace('_', ' ')} {share:.0%}" for way, share in of.items())
    return f"{ways}, wasted {counted['wasted_bytes'] / 1e9:.3g} GB"


def _latency(rows: Sequence[dict[str, Any]]) -> str:
    columns: dict[str, Any] = {
        "model, batch": lambda of: f"{of[0]}, {of[1]}",
        "published": lambda of: f"{LATENCY_V100[of]:g}",
        "here": lambda of: f"{found['token_s']:.3g}" if (found := find(rows, "PreScope", "V100", *of)) else "-",
    }
    return f"## Fig. 14, V100: seconds per output token of PreScope\n\n{markdown_table(columns, LATENCY_V100)}"


def _overheads(rows: Sequence[dict[str, Any]]) -> str:
    """Write Figs. 5 and 13: what bringing and computing an expert takes, as PreScope measured it on the simulated
    machines, and from how many tokens on the CPU takes longer than the transfer and the GPU."""

    def costs_of(of: tuple[str, str]) -> dict[str, float]:
        found = find(rows, "PreScope", *of, 64)
        assert found is not None
        return dict(found["plan"]["costs"])

    def ms(of: tuple[str, str], way: str, tokens: int = 1) -> float:
        costs = costs_of(of)
        if way == "io":
            return float(1e3 * costs["io_s"])
        if way == "gpu":
            return float(1e3 * (costs["gpu_s"] + (tokens - 1) * costs["gpu_token_s"]))
        return float(1e3 * (costs["cpu_start_s"] + tokens * costs["cpu_token_s"]))

    def even(of: tuple[str, str]) -> str:
        costs = costs_of(of)
        ahead_s = costs["io_s"] + costs["gpu_s"] - costs["gpu_token_s"] - costs["cpu_start_s"]
        saved_s = costs["cpu_token_s"] - costs["gpu_token_s"]
        return f"{ahead_s / saved_s:.0f}" if saved_s > 0 else "-"

    columns: dict[str, Any] = {
        "GPU, model": ", ".join,
        "transfer": lambda of: f"{ms(of, 'io'):.3g}",
        "GPU, 1 and 64 tokens": lambda of: f"{ms(of, 'gpu'):.2g}, {ms(of, 'gpu', 64):.2g}",
    }
    for tokens in (1, 8, 16, 32, 64):
        columns[f"CPU, {tokens}"] = lambda of, tokens=tokens: (
            f"{ms(of, 'cpu', tokens):.3g} ({CPU_EXPERT_MS[of[1]][tokens]:g})"
        )
    places = [(gpu, model) for gpu in GPUS for model in MODELS if find(rows, "PreScope", gpu, model, 64)]
    columns["CPU takes as long as transfer and GPU at"] = lambda of: f"{even(of)} tokens"
    told = "## Figs. 5 and 13: ms for an expert, by tokens; in brackets LayerScope's, on a host of its own"
    return f"{told}\n\n{markdown_table(columns, places)}"


def draw_throughput(data: dict[str, Any]) -> Figure:
    """Draw Fig. 12: tokens a second over the batch, a panel for each GPU and model."""
    return _by_batch(data, "tok_s", "tok/s", {("A100", m, 64): v for m, v in THROUGHPUT_A100_64.items()})


def draw_latency(data: dict[str, Any]) -> Figure:
    """Draw Fig. 14: seconds per output token over the batch."""
    return _by_batch(data, "token_s", "s per output token", {("V100", *of): v for of, v in LATENCY_V100.items()})


def _by_batch(data: dict[str, Any], fact: str, name: str, published: dict[tuple[str, str, int], float]) -> Figure:
    figure = new_figure(11, 5.6)
    for at, (gpu, model) in enumerate(((gpu, model) for gpu in GPUS for model in MODELS), start=1):
        axes = figure.add_subplot(len(GPUS), len(MODELS), at)
        for system in SYSTEMS:
            found = [(b, r[fact]) for b in BATCHES if (r := find(data["rows"], system, gpu, model, b))]
            if found:
                axes.plot(*zip(*found, strict=True), marker="o", markersize=3, label=system)
        for (of_gpu, of_model, batch), value in published.items():
            if (of_gpu, of_model) == (gpu, model):
                axes.plot([batch], [value], "kx", label="PreScope, published")
        axes.set(title=f"{gpu}, {model}", xlabel="batch", ylabel=name, xscale="log", yscale="log")
        plain_logarithms(axes, x=BATCHES)
    return with_one_legend(figure)
