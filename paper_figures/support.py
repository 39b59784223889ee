"""All papers' figures share these helpers: where results lie, and how a figure says what its numbers are."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.config import ConfigError, parse
from harness.hardware.profile import HardwareConfig
from harness.model.config import ModelConfig
from harness.model.planned import planned_model
from harness.model.spec import ModelSpec
from paper_figures import composing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[1]
REFERENCE = ROOT / "results" / "reference"  # committed
FIGURES = ROOT / "results" / "figures"  # made again by one command; ignored by git


DPI = 110
_FOOT_CHARACTERS_AN_INCH = 16


def composed(*overrides: str) -> dict[str, Any]:
    """Compose the configuration of the simulated machine, or of another one that is named."""
    return composing.composed("machine=simulated", *overrides)


def hardware_profile(name: str) -> HardwareConfig:
    return parse(HardwareConfig, composed(f"hardware={name}")["hardware"], "hardware")


def model_spec(name: str) -> ModelSpec:
    return planned_model(parse(ModelConfig, composed(f"model={name}")["model"], "model")).spec


def new_figure(width: float, height: float) -> Figure:
    """Make an empty figure, off screen. Raises ConfigError where matplotlib, an optional dependency, is missing."""
    try:
        import matplotlib
    except ImportError as error:
        told = 'not installed; pip install -c constraints.txt -e ".[figures]" brings it'
        raise ConfigError("matplotlib", told) from error

    matplotlib.use("Agg")
    from matplotlib import pyplot

    style: Any = {"font.size": 9, "axes.grid": True, "grid.alpha": 0.25, "axes.spines.top": False, "legend.fontsize": 8}
    pyplot.rcParams.update({**style, "axes.spines.right": False, "axes.titlesize": 10, "legend.frameon": False})
    return pyplot.figure(figsize=(width, height), layout="constrained")


def with_one_legend(figure: Figure) -> Figure:
    """Put one legend above all panels, which has each label once."""
    found = [axes.get_legend_handles_labels() for axes in figure.axes]
    by_label = {label: line for lines, labels in found for line, label in zip(lines, labels, strict=True)}
    columns = max(1, int(figure.get_figwidth() / 1.5))
    figure.legend(by_label.values(), by_label, loc="outside upper center", ncols=min(len(by_label), columns))
    return figure


def plain_logarithms(axes: Axes, *, x: Sequence[float]) -> None:
    """Write the numbers of logarithmic axes without powers; those of the horizontal one are `x`."""
    from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

    axes.set_xticks(x)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(ScalarFormatter())
        axis.set_minor_formatter(NullFormatter())


def save(figure: Figure, path: Path, *, label: str, note: str) -> None:
    """Save a figure; at its foot it says what its numbers are, and where they come from."""
    from matplotlib import pyplot

    path.parent.mkdir(parents=True, exist_ok=True)
    foot = textwrap.fill(f"{label} · {note}", int(figure.get_figwidth() * _FOOT_CHARACTERS_AN_INCH))
    figure.supxlabel(foot, fontsize=7, color="0.35", x=0.01, ha="left")
    figure.savefig(path, dpi=DPI)
    pyplot.close(figure)


def markdown_table(columns: Mapping[str, Callable[[Any], str]], rows: Iterable[Any]) -> str:
    """Write a table; `columns` gives each heading the text that stands there for a row."""
    lines = ["| " + " | ".join(columns) + " |", "|" + " ---: |" * len(columns)]
    lines += ["| " + " | ".join(cell(row) for cell in columns.values()) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Write JSON in which lists of plain numbers stay on one line each."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_text(data) + "\n", encoding="utf-8")


def read_json(path: Path) -> dict[str, Any]:
    data = json.loads(path.read_text(encoding="utf-8"))
    assert isinstance(data, dict)
    return data


def _text(value: Any, indent: str = "") -> str:
    inner = indent + " "
    if isinstance(value, dict) and value:
        items = (f"{inner}{json.dumps(str(key))}: {_text(item, inner)}" for key, item in value.items())
        return "{\n" + ",\n".join(items) + f"\n{indent}}}"
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        return "[\n" + ",\n".join(inner + _text(item, inner) for item in value) + f"\n{indent}]"
    return json.dumps(value, separators=(",", ":") if isinstance(value, list) else None)
