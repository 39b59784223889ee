"""Simulate PreScope's Figs. 5 and 12 to 14: throughput and seconds per output token beside other systems, and what an
expert takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any

from paper_figures.prescope.cases import BATCHES, GPUS, MODELS, OTHERS, Case, all_cases, find
from paper_figures.prescope.published import CPU_EXPERT_MS, LATENCY_V100, THROUGHPUT_A100_64
from paper_figures.support import markdown_table, new_figure, plain_logarithms, with_one_legend

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SYSTEMS = ("PreScope", *OTHERS)


def wanted() -> list[Case]:
    return all_cases(SYSTEMS)


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


@dataclass(frozen=True)
class ExpertTimes:
    """The times of an expert in milliseconds, as PreScope measured them on the simulated machine of a row."""

    costs: Mapping[str, float]

    @property
    def io_ms(self) -> float:
        return 1e3 * self.costs["io_s"]

    def gpu_ms(self, tokens: int) -> float:
        return 1e3 * (self.costs["gpu_s"] + (tokens - 1) * self.costs["gpu_token_s"])

    def cpu_ms(self, tokens: int) -> float:
        return 1e3 * (self.costs["cpu_start_s"] + tokens * self.costs["cpu_token_s"])

    @property
    def even(self) -> float:
        """The tokens for which the CPU takes as long as the transfer and the GPU; infinite where it never does."""
        saved_ms = 1e3 * (self.costs["cpu_token_s"] - self.costs["gpu_token_s"])
        return (self.io_ms + self.gpu_ms(0) - self.cpu_ms(0)) / saved_ms if saved_ms > 0 else inf


def measured_costs(rows: Sequence[dict[str, Any]]) -> dict[tuple[str, str], Mapping[str, float]]:
    """Return what an expert costs, as `ExpertCosts.as_record` has it, by GPU and model."""
    places = ((gpu, model) for gpu in GPUS for model in MODELS)
    return {place: r["plan"]["costs"] for place in places if (r := find(rows, "PreScope", *place, 64)) is not None}


def _overheads(rows: Sequence[dict[str, Any]]) -> str:
    """Write Figs. 5 and 13: what bringing and computing an expert takes, and from how many tokens on the CPU takes
    longer than the transfer and the GPU."""
    times = {place: ExpertTimes(costs) for place, costs in measured_costs(rows).items()}
    columns: dict[str, Any] = {
        "GPU, model": ", ".join,
        "transfer": lambda of: f"{times[of].io_ms:.3g}",
        "GPU, 1 and 64 tokens": lambda of: f"{times[of].gpu_ms(1):.2g}, {times[of].gpu_ms(64):.2g}",
    }
    for tokens in (1, 8, 16, 32, 64):
        columns[f"CPU, {tokens}"] = lambda of, tokens=tokens: (
            f"{times[of].cpu_ms(tokens):.3g} ({CPU_EXPERT_MS[of[1]][tokens]:g})"
        )
    columns["CPU takes as long as transfer and GPU at"] = lambda of: (
        f"{times[of].even:.0f} tokens" if times[of].even < inf else "-"
    )
    told = "## Figs. 5 and 13: ms for an expert, by tokens; in brackets LayerScope's, on a host of its own"
    return f"{told}\n\n{markdown_table(columns, times)}"


def draw_expert(data: dict[str, Any]) -> Figure:
    """Draw what an expert takes over its tokens: Fig. 13, of which Mixtral's panels are Fig. 5."""
    rows, tokens = data["rows"], range(1, 65)
    figure = new_figure(11, 5.6)
    for at, ((gpu, model), costs) in enumerate(measured_costs(rows).items(), start=1):
        axes, times = figure.add_subplot(len(GPUS), len(MODELS), at), ExpertTimes(costs)
        axes.plot(tokens, [times.cpu_ms(n) for n in tokens], label="CPU")
        axes.plot(tokens, [times.io_ms] * len(tokens), label="transfer")
        axes.plot(tokens, [times.gpu_ms(n) for n in tokens], label="GPU")
        axes.plot(*zip(*CPU_EXPERT_MS[model].items(), strict=True), "kx", label="CPU, LayerScope's")
        axes.set(title=f"{gpu}, {model}", xlabel="tokens of the expert", ylabel="ms", ylim=(0, None))
    return with_one_legend(figure)


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
