"""Simulate PreScope's Fig. 15: the throughput that is lost without each of its parts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paper_figures.prescope.cases import BATCHES, GPUS, MODELS, OURS, Case, all_cases, find
from paper_figures.prescope.published import LOST
from paper_figures.routing.published import HOT_TABLE_LOSS
from paper_figures.support import markdown_table, new_figure, with_one_legend

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def wanted() -> list[Case]:
    return all_cases(OURS)


def lost(rows: list[dict[str, Any]], gpu: str, model: str, batch: int, variant: str, way: str = "") -> float | None:
    """Return the share of PreScope's throughput that a variant loses; None where either was not simulated."""
    whole, part = (find(rows, system, gpu, model, batch, way) for system in ("PreScope", variant))
    return 1 - part["tok_s"] / whole["tok_s"] if whole and part else None


def tables(data: dict[str, Any]) -> str:
    def cell(of: tuple[str, str, int], variant: str) -> str:
        found, published = lost(data["rows"], *of, variant), LOST.get((*of, variant))
        text = "-" if found is None else f"{found:.0%}"
        return text if published is None else f"{text} ({published:.0%})"

    columns: dict[str, Any] = {"GPU, model, batch": lambda of: ", ".join(map(str, of))}
    for variant in list(OURS)[1:]:
        columns[variant] = lambda of, variant=variant: cell(of, variant)
    places = [(gpu, model, batch) for gpu in GPUS for model in MODELS for batch in BATCHES]
    told = "# PreScope, Fig. 15: throughput lost without a part, and published in brackets (simulated)"
    return (
        f"{told}\n\n{markdown_table(columns, places)}\nThe paper tells 20 to 54 % in all.\n\n"
        f"## Hits of the table\n\n{_hits(data['rows'])}\n"
        "The share of the active experts of decode that the table has, hot ones or random ones, which is Fig. 15 "
        "without table. "
        f"Published (section 6.3): {HOT_TABLE_LOSS[0]:.0%} to {HOT_TABLE_LOSS[1]:.0%} lost, at batches below 16.\n"
    )


def _hits(rows: list[dict[str, Any]]) -> str:
    def share(of: tuple[str, str, int], system: str) -> str:
        found = find(rows, system, *of)
        return "-" if found is None else f"{found['decode_counts']['resident'] / found['decode_counts']['active']:.0%}"

    columns: dict[str, Any] = {"GPU, model": lambda of: ", ".join(of)}
    for batch in BATCHES:
        columns[f"batch {batch}"] = lambda of, batch=batch: " → ".join(
            share((*of, batch), system) for system in ("PreScope", "without table")
        )
    return markdown_table(columns, [(gpu, model) for gpu in GPUS for model in MODELS])


def draw(data: dict[str, Any]) -> Figure:
    """Draw Fig. 15: the share lost without each part over the batch, a panel for each GPU and model."""
    figure = new_figure(11, 5)
    variants = list(OURS)[1:]
    for at, (gpu, model) in enumerate(((gpu, model) for gpu in GPUS for model in MODELS), start=1):
        axes = figure.add_subplot(len(GPUS), len(MODELS), at)
        for place, variant in enumerate(variants):
            found = {b: lost(data["rows"], gpu, model, b, variant) for b in BATCHES}
            bars = {n + 0.2 * place: 100 * share for n, (_, share) in enumerate(found.items()) if share is not None}
            axes.bar(list(bars), list(bars.values()), width=0.2, label=variant)
            for n, batch in enumerate(BATCHES):
                if (published := LOST.get((gpu, model, batch, variant))) is not None:
                    axes.plot([n + 0.2 * place], [100 * published], "kx", label="published")
        axes.set_xticks([n + 0.3 for n in range(len(BATCHES))], [str(batch) for batch in BATCHES])
        axes.set(title=f"{gpu}, {model}", xlabel="batch", ylabel="% of throughput lost")
    return with_one_legend(figure)
