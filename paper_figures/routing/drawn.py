"""Draw what recorded routing is like: a column for each model, its untrained twin in grey where there is one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.study.predictability import GATE
from paper_figures.support import new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("tab:blue", "tab:orange", "tab:green", "tab:purple", "tab:red", "tab:brown")
GREY = "0.55"
PREDICTORS = {
    GATE: ("next layer's router", "tab:red"),
    "word": ("token's id", "tab:purple"),
    "layer_before": ("this layer's experts", "tab:green"),
    "previous_token": ("previous token's experts", "tab:orange"),
    "popularity": ("popularity", "tab:blue"),
}
POLICIES = {
    "belady": ("Belady's optimum", "black"),
    "lru": ("LRU", "tab:orange"),
    "lfu": ("LFU", "tab:green"),
    "hot_table": ("table of hot experts", "tab:blue"),
}
Study = Mapping[str, Any]


@dataclass(frozen=True)
class Column:
    """A model's study, and that of the same model without training, where there is one."""

    title: str
    study: Study
    control: Study | None


def percent(axes: Axes, *, x: bool = False) -> None:
    from matplotlib.ticker import PercentFormatter

    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    if x:
        axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))


def columns(
    given: Sequence[Column], rows: Sequence[Callable[[Axes, Column], None]], *, height: float, width: float = 4.7
) -> Figure:
    """Draw each of `rows` for each model, one model a column."""
    figure = new_figure(width * len(given), height * len(rows))
    grid = figure.subplots(len(rows), len(given), squeeze=False)
    for row, function in enumerate(rows):
        for at, column in enumerate(given):
            function(grid[row][at], column)
            if not row:
                axes = grid[row][at]
                axes.set_title(f"{column.title}\n{axes.get_title()}" if axes.get_title() else column.title)
    return figure


def over_domains(study: Study, group: str, *keys: str) -> np.ndarray:
    """Return the mean over domains of one thing in a group."""
    found = []
    for value in study[group].values():
        for key in keys:
            value = value[key]
        found.append(value)
    return np.mean(found, axis=0)


def layers_of(study: Study, count: int) -> np.ndarray:
    """Return the numbers of the last `count` layers with a router, as the model counts its layers."""
    model = study["model"]
    return np.arange(model["layers"] - count, model["layers"]) + model["first_layer"]


def popularity(given: Sequence[Column]) -> Figure:
    return columns(given, [_ranks, _busiest], height=2.9)


def _ranks(axes: Axes, column: Column) -> None:
    num_experts = column.study["model"]["experts"]
    for colour, (name, found) in zip(COLOURS, column.study["popularity"].items(), strict=False):
        shares = np.array(found["sorted_shares"]) * num_experts
        axes.plot(range(1, num_experts + 1), shares.mean(axis=0), color=colour, label=name)
        if name == next(iter(column.study["popularity"])):
            axes.fill_between(
                range(1, num_experts + 1), shares.min(axis=0), shares.max(axis=0), color=colour, alpha=0.15, lw=0
            )
    if column.control is not None:
        shares = over_domains(column.control, "popularity", "sorted_shares").mean(axis=0) * num_experts
        axes.plot(range(1, num_experts + 1), shares, color=GREY, ls="--", label="untrained")
    axes.axhline(1.0, color="black", lw=0.6)
    axes.set(xlabel="expert by rank in its layer", ylabel="load / mean load", ylim=(0, None))
    axes.legend(title="mean over layers; band: layers of the first", title_fontsize=7)


def _busiest(axes: Axes, column: Column) -> None:
    for colour, (name, found) in zip(COLOURS, column.study["popularity"].items(), strict=False):
        values = found["busiest_over_mean"]
        axes.plot(layers_of(column.study, len(values)), values, "o-", ms=3, color=colour, label=name)
    if column.control is not None:
        values = over_domains(column.control, "popularity", "busiest_over_mean")
        axes.plot(layers_of(column.study, len(values)), values, "o--", ms=3, color=GREY, label="untrained")
    axes.set(xlabel="layer", ylabel="busiest expert / mean", ylim=(1, None))


def drift(given: Sequence[Column]) -> Figure:
    """Draw how far the loads of one domain are from those of another."""
    return columns(given, [_matrix], height=3.6)


def _matrix(axes: Axes, column: Column) -> None:
    found = column.study["drift"]
    values, names = np.array(found["total_variation"]), found["domains"]
    top = max(0.3, float(values.max()))
    axes.imshow(values, cmap="Oranges", vmin=0, vmax=top)
    for row, col in np.ndindex(values.shape):
        text = f"{values[row, col]:.0%}\n({found['hot_overlap'][row][col]:.0%})"
        dark = values[row, col] > 0.6 * top
        axes.text(col, row, text, ha="center", va="center", fontsize=8, color="white" if dark else "black")
    axes.set_xticks(range(len(names)), names, fontsize=8, rotation=20)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.grid(False)
    axes.set(
        xlabel="every second request of", ylabel="the other requests of",
        title=f"load that would have to move (same among the {found['hot_experts']} hottest)",
    )  # fmt: skip


def correlation(given: Sequence[Column]) -> Figure:
    """Draw how far tokens share experts with earlier tokens, and layers follow the one before."""
    return columns(given, [_kept, _followed], height=2.9)


def _kept(axes: Axes, column: Column) -> None:
    lags = next(iter(column.study["tokens"].values()))["lags"]
    for colour, (name, found) in zip(COLOURS, column.study["tokens"].items(), strict=False):
        shares = [np.nan if of_lag is None else np.mean(of_lag) for of_lag in found["kept"]]
        axes.plot(lags, shares, "o-", ms=3, color=colour, label=name)
        axes.axhline(np.mean(found["independent"]), color=colour, lw=0.8, ls=":")
    if column.control is not None:
        kept = [found["kept"] for found in column.control["tokens"].values()]
        shares = [
            np.mean([np.mean(of_lag) for of_lag in same if of_lag is not None]) for same in zip(*kept, strict=True)
        ]
        axes.plot(lags, shares, "o--", ms=3, color=GREY, label="untrained")
    axes.set_xscale("log", base=2)
    axes.set_xticks(lags, [str(lag) for lag in lags])
    axes.set(xlabel="tokens back", ylabel="experts in common", ylim=(0, 1.3), yticks=np.linspace(0, 1, 6))
    axes.legend(title="dotted: independent tokens", title_fontsize=7, loc="upper center", ncols=3)
    percent(axes)


def _followed(axes: Axes, column: Column) -> None:
    followed, independent = (over_domains(column.study, "layers", key) for key in ("followed", "independent"))
    layers = layers_of(column.study, len(followed))
    axes.plot(layers, followed, "o-", ms=3, color="tab:green", label="images of the experts one layer before")
    axes.plot(layers, independent, ":", color="tab:green", label="if layers were independent")
    if column.control is not None:
        axes.plot(
            layers, over_domains(column.control, "layers", "followed"), "o--", ms=3, color=GREY, label="untrained"
        )
    axes.set(xlabel="layer", ylabel="from the layer before", ylim=(0, 1))
    axes.legend(loc="upper right")
    percent(axes)


def groups(given: Sequence[Column]) -> Figure:
    """Draw by layer what PreScope's Fig. 2 groups layers by; weights are drawn where runs recorded them."""
    return columns(given, [_groups], height=3.1)


def _groups(axes: Axes, column: Column) -> None:
    lines = {
        "information on the favourite": (informed(column.study), "s-", "tab:purple"),
        "load of the hottest quarter": (hottest_quarter(column.study), "o-", "tab:blue"),
        "cosine of gating inputs": (cosines(column.study), "^-", "tab:red"),
        "weight of the favourite": (favourite_weights(column.study), "d-", "tab:green"),
    }
    for label, (values, form, colour) in lines.items():
        if values is not None:
            axes.plot(layers_of(column.study, len(values)), values, form, ms=3, color=colour, label=label)
    axes.set(xlabel="layer", ylim=(0, 1.3), yticks=np.linspace(0, 1, 6))
    axes.legend(fontsize=7, loc="upper center", ncols=2)
    percent(axes)


def informed(study: Study) -> np.ndarray:
    """Return the information that the favourite of the layer before gives, of that of the favourite [layers - 1]."""
    bits, noise, most = (
        over_domains(study, "layers", "favourites", key) for key in ("bits", "shuffled_bits", "entropy_bits")
    )
    return np.asarray((bits - noise) / most)


def hottest_quarter(study: Study) -> np.ndarray:
    """Return the share of the load that the hottest quarter of the experts has [layers]."""
    shares = over_domains(study, "popularity", "sorted_shares")
    return np.asarray(shares[:, : shares.shape[1] // 4].sum(axis=1))


def cosines(study: Study) -> np.ndarray | None:
    """Return the cosine of a gating input and that of the layer before [layers - 1], None if none was recorded."""
    is_known = GATE in next(iter(study["prediction"].values()))
    return over_domains(study, "prediction", GATE, "cosine") if is_known else None


def favourite_weights(study: Study) -> np.ndarray | None:
    """Return the favourite's share of a token's weights [layers], None if weights were not recorded."""
    is_known = all(domain["favourite_weight"] is not None for domain in study["domains"].values())
    return over_domains(study, "domains", "favourite_weight") if is_known else None


def prediction(given: Sequence[Column]) -> Figure:
    """Draw how well the next layer's experts are predicted, by layer and by the number of predictions."""
    return columns(given, [_by_layer, _by_number], height=3.1)


def _by_layer(axes: Axes, column: Column) -> None:
    k = column.study["model"]["k"]
    for name, (label, colour) in PREDICTORS.items():
        if name in next(iter(column.study["prediction"].values())):
            named = over_domains(column.study, "prediction", name, "true_that_are_predicted")[:, k - 1]
            axes.plot(layers_of(column.study, len(named)), named, "o-", ms=3, color=colour, label=label)
    _control_gate(axes, column, lambda named: (layers_of(column.study, len(named)), named[:, k - 1]))
    chance = k / column.study["model"]["experts"]
    axes.axhline(chance, color="black", lw=0.6)
    axes.set(xlabel="layer that is predicted", ylabel=f"of {k} experts, named by {k}", ylim=(0, 1))
    percent(axes)


def _by_number(axes: Axes, column: Column) -> None:
    for name, (label, colour) in PREDICTORS.items():
        if name in next(iter(column.study["prediction"].values())):
            right = over_domains(column.study, "prediction", name, "predicted_that_are_true").mean(axis=0)
            axes.plot(range(1, len(right) + 1), right, "o-", ms=3, color=colour, label=label)
    axes.axvline(column.study["model"]["k"], color="black", lw=0.6)
    axes.set_xticks(range(1, column.study["model"]["k"] + 3))
    axes.set(xlabel="m predicted experts (line: k)", ylabel="predicted that are true", ylim=(0, 1))
    axes.legend(fontsize=7)
    percent(axes)


def _control_gate(axes: Axes, column: Column, points: Callable[[np.ndarray], Any]) -> None:
    if column.control is None or GATE not in next(iter(column.control["prediction"].values())):
        return
    named = over_domains(column.control, "prediction", GATE, "true_that_are_predicted")
    (line,) = axes.plot(*points(named), "o--", ms=3, color=GREY, label="next layer's router, untrained")
    axes.legend(handles=[line], fontsize=7)


def caches(given: Sequence[Column]) -> Figure:
    """Draw hit rates over the size of caches, for one request at a time and for several."""
    lanes = sorted({row["requests"] for column in given for of in column.study["caches"].values() for row in of})
    return columns(given, [lambda axes, column, n=n: _rates(axes, column, n) for n in lanes], height=2.6)


def _rates(axes: Axes, column: Column, requests: int) -> None:
    for name, (label, colour) in POLICIES.items():
        sizes, rates = _hit_rates(column.study, name, requests)
        axes.plot(sizes, rates, "o-", ms=3, color=colour, label=label)
    if column.control is not None:
        axes.plot(*_hit_rates(column.control, "lru", requests), "o--", ms=3, color=GREY, label="LRU, untrained")
    axes.plot([0, 0.75], [0, 0.75], color="black", lw=0.6)
    if requests == 1:
        axes.legend(fontsize=7)
    told = "1 request" if requests == 1 else f"{requests} requests"
    axes.set(xlabel="size of the cache, of all experts", ylabel=f"hits, {told} at a time", ylim=(0, 1), xlim=(0, 0.78))
    percent(axes, x=True)


def _hit_rates(study: Study, policy: str, requests: int) -> tuple[list[float], list[float]]:
    rows = [row for of_domain in study["caches"].values() for row in of_domain if row["requests"] == requests]
    sizes = sorted({row["size"] for row in rows})
    return sizes, [float(np.mean([row[policy] for row in rows if row["size"] == size])) for size in sizes]


def fits(given: Sequence[Column]) -> Figure:
    """Draw what synthetic routing with fitted settings has of what was recorded."""
    return columns(given, [_likeness], height=3.2)


def _likeness(axes: Axes, column: Column) -> None:
    routings = column.study["fit"]["routings"]
    sizes = [row["size"] for row in routings["recorded"]["caches"]]
    names = [
        "kept from the\ntoken before",
        "images of the\nlayer before",
        *(f"LRU hits,\n{size:.0%}" for size in sizes),
    ]
    width = 0.8 / len(routings)
    for at, (name, found) in enumerate(routings.items()):
        values = [found["kept"], found["followed"], *(row["lru"] for row in found["caches"])]
        colour = {"recorded": "black", "correlated": "tab:green", "skewed": "tab:blue", "uniform": "0.75"}[name]
        axes.bar(np.arange(len(values)) + (at - 1.5) * width, values, width, color=colour, label=name)
    axes.set_xticks(range(len(names)), names, fontsize=7)
    axes.set_ylim(0, 1)
    axes.legend()
    percent(axes)
