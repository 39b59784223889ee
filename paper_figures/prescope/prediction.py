"""Write how well experts are predicted: `python -m paper_figures.prescope.prediction [FOLDER ...]`.

Each FOLDER is what `python -m harness.llapor` wrote. Its numbers are put, rounded, into `out` under the folder's name,
with its hit rates for simulations; without a FOLDER, those that lie there are read. The page prediction.md and the
picture prediction.png have Table 3 and Figs. 2, 6 and 16 beside what the paper's text says of them.
"""

from __future__ import annotations

import shutil
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.cli.arguments import CommandParser
from harness.config import ConfigError
from harness.interrupts import exit_code
from harness.llapor.files import DESCRIPTION, RATES
from harness.model.cache import make_writable
from harness.study.predictability import EXTRA, GATE, HOT
from harness.study.tables import table, write_rounded
from paper_figures.routing.published import LLAPOR_LEAST_HIT_RATE, LLAPOR_OVER_GATE, STATEMENTS, TABLE3, TABLE3_COST
from paper_figures.support import REFERENCE, new_figure, read_json, save, with_one_legend

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FOLDER = REFERENCE / "prescope-prediction"
RATES_END = "-hit-rates.json"
WAYS = {
    "llapor": "LLaPor", "llapor_online": "LLaPor, learning on", GATE: "next layer's router",
    "word": "token id", "layer_before": "this layer's experts", "popularity": "popularity",
}  # fmt: skip
Numbers = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = CommandParser("paper_figures.prescope.prediction", __doc__)
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER", help="what harness.llapor wrote")
    parser.add_argument("--out", type=Path, default=FOLDER, metavar="FOLDER", help="default: %(default)s")
    return parser.run(_report, arguments)


def _report(given: Namespace) -> int:
    make_writable(given.out, "--out")
    for folder in given.folders:
        if not (folder / DESCRIPTION).is_file():
            raise ConfigError("FOLDER", f"{folder}: has no {DESCRIPTION}; python -m harness.llapor writes it")
        write_rounded(given.out / f"{folder.resolve().name}.json", read_json(folder / DESCRIPTION))
        shutil.copyfile(folder / RATES, given.out / f"{folder.resolve().name}{RATES_END}")
    paths = [path for path in sorted(given.out.glob("*.json")) if not path.name.endswith(RATES_END)]
    if not paths:
        raise ConfigError("FOLDER", f"{given.out}: has no numbers yet; name what python -m harness.llapor wrote")
    found = {path.stem: read_json(path) for path in paths}
    (given.out / "prediction.md").write_text(page(found), encoding="utf-8")
    print(given.out / "prediction.md")
    save(by_layer(found), given.out / "prediction.png", label="recorded", note="small models; harness.llapor")
    print(given.out / "prediction.png")
    return 0


def page(found: Mapping[str, Numbers]) -> str:
    """Write all tables."""
    parts = ["# Predicting experts one layer ahead, beside PreScope", *(_origin(name, n) for name, n in found.items())]
    parts += [
        "## Table 3: hot experts of a batch\n\n"
        "Of 32 tokens, the m experts for which most tokens are predicted that are among the true m + 2 with most "
        "tokens (m = 2, 3, 4); the true tokens of the predicted four over those of the true four; the size of a "
        "layer's predictor (published in 16 bits, ours in 32 with its PCA); and its time for 32 tokens (published on "
        "an A100, ours on one shared core of a CPU). Means over the layers but the first.",
        _hot(found),
        "## Fig. 16: the experts of a token\n\n"
        "Named: the share of the k chosen experts that are among the k predicted. Within: the share of the k predicted "
        f"that the true router ranks among its first k + {EXTRA}. Published (section 6.4): LLaPor names "
        f"{LLAPOR_LEAST_HIT_RATE:.0%} or more in any layer of any model, {LLAPOR_OVER_GATE[0]:.0%} to "
        f"{LLAPOR_OVER_GATE[1]:.1%} better than gate-based prediction.",
        _tokens(found),
        "## Figs. 2 and 6: by layer\n\n"
        "Likeness of a layer to the one before (cosine of gating inputs, experts that are images of those before), the "
        "group found from both, and the named share by way of predicting, on the first text that is another than those "
        "learned from.",
        *(_layers(name, n) for name, n in found.items()),
        table(["published", "of large models"], [list(row) for row in STATEMENTS]),
        "Fig. 5 is about the cost of experts and not about prediction; it is not here.",
    ]
    return "\n\n".join(parts) + "\n"


def _origin(name: str, n: Numbers) -> str:
    model, texts = n["model"], n["texts"]
    tests = ", ".join(f"{each['name']} ({each['tokens']:,} tokens)" for each in texts["tests"])
    settings = {key: n["settings"][key] for key in ("epochs", "batch_tokens", "most_tokens")}
    settings |= {f"middle.{key}": n["settings"]["middle"][key] for key in ("pca_dims", "width")}
    told = ", ".join(f"{key} {value}" for key, value in settings.items())
    return (
        f"**{name}**: {model['name']}, {len(model['layers'])} layers with a router, {model['k']} of {model['experts']} "
        f"experts, hidden size {model['hidden']}. Weights: {n['weights']}. Learned from {texts['fit']['tokens']:,} "
        f"tokens of {texts['fit']['name']}, tested on other texts: {tests}. No test prompt was learned from. {told}. "
        f"`{n['command']}`, code {n['code']}."
    )


def _tested(n: Numbers) -> dict[str, Any]:
    """Return the judgements on texts other than those learned from; on held-out text where there are none."""
    names = [each["name"] for each in n["texts"]["tests"]] or list(n["judgements"])
    return {name: n["judgements"][name] for name in names}


def _hot(found: Mapping[str, Numbers]) -> str:
    keys = [*(f"hot_{m}" for m in HOT), f"hot_{HOT[-1]}_tokens"]
    rows = [
        [f"{name}: LLaPor, published", *(f"{v[m]:.0%}" for m in (*HOT, "tokens")), *TABLE3_COST[name]]
        for name, v in TABLE3.items()
    ]
    for name, n in found.items():
        sizes = [row["num_bytes"] / 1e6 for row in n["predictors"]]
        times = [row["seconds_per_32_tokens"] * 1e3 for row in n["predictors"]]
        for text, judged in _tested(n).items():
            for way in WAYS:
                if way in judged:
                    shares = [f"{np.mean(judged[way][key]):.0%}" for key in keys]
                    is_ours = way.startswith("llapor")
                    told = [f"{min(sizes):.1f}-{max(sizes):.1f} MB", f"{min(times):.2f}-{max(times):.2f} ms"]
                    rows.append([f"{name} on {text}: {WAYS[way]}", *shares, *(told if is_ours else ["-", "-"])])
    return table(["model and way", *(f"Top{m}" for m in HOT), "tokens", "a layer", "time"], rows)


def named_by_layer(n: Numbers, judged: Mapping[str, Any], way: str) -> np.ndarray:
    """Return the share of the k chosen experts that a way of predicting names, by layer."""
    return np.array(judged[way]["true_that_are_predicted"])[:, n["model"]["k"] - 1]


def _tokens(found: Mapping[str, Numbers]) -> str:
    rows = []
    for name, n in found.items():
        for text, judged in _tested(n).items():
            for way in WAYS:
                if way in judged:
                    named, within = named_by_layer(n, judged, way), judged[way].get("within_true_top")
                    share = "-" if within is None else f"{np.mean(within):.0%}"
                    of_layers = [f"{each:.0%}" for each in (named.mean(), named.min(), named.max())]
                    rows.append([f"{name} on {text}: {WAYS[way]}", *of_layers, share])
    return table(["model and way", "named", "worst layer", "best layer", "within"], rows)


def _layers(name: str, n: Numbers) -> str:
    text, judged = next(iter(_tested(n).items()))
    ways = [way for way in WAYS if way in judged]
    by_way = [named_by_layer(n, judged, way) for way in ways]
    rows = []
    for at, row in enumerate(n["predictors"]):
        likeness = [f"{n['likeness'][key][at]:.2f}" for key in ("cosine", "followed")]
        rows.append([f"{name}, layer {row['layer']}", row["group"], *likeness, *(f"{each[at]:.0%}" for each in by_way)])
    return f"On {text}:\n\n" + table(["layer", "group", "cosine", "images", *(WAYS[way] for way in ways)], rows)


def by_layer(found: Mapping[str, Numbers]) -> Figure:
    """Draw the named share by layer, with a panel for each model."""
    columns = min(2, len(found))
    rows = -(-len(found) // columns)
    figure = new_figure(4.5 * columns, 0.6 + 2.8 * rows)
    for place, (name, n) in enumerate(found.items(), start=1):
        text, judged = next(iter(_tested(n).items()))
        axes = figure.add_subplot(rows, columns, place)
        for number, (way, shown) in enumerate(WAYS.items()):  # a way has its colour, whichever of them a model has
            if way in judged:
                layers, named = [row["layer"] for row in n["predictors"]], 100 * named_by_layer(n, judged, way)
                axes.plot(layers, named, f"oC{number}-", markersize=3, label=shown)
        axes.axhline(100 * LLAPOR_LEAST_HIT_RATE, color="0.5", linestyle=":", label="least of LLaPor, published")
        axes.set(title=f"{name} on {text}", xlabel="layer", ylabel="% of the k experts named", ylim=(0, 100))
    return with_one_legend(figure)


if __name__ == "__main__":
    sys.exit(exit_code(main))
