"""Figures in two steps: numbers go to a JSON file below results/figures, and pictures are drawn from that file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paper_figures.support import read_json, save, write_json

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Draw = Callable[[dict[str, Any]], "Figure"]


def make(folder: Path, name: str, data: dict[str, Any], draw: Mapping[str, Draw], *, note: str) -> None:
    """Write `data` (with its `label`) to <folder>/<name>.json, and each picture of it beside."""
    write_json(folder / f"{name}.json", data)
    written = read_json(folder / f"{name}.json")
    for picture, function in draw.items():
        save(function(written), folder / f"{picture}.png", label=written["label"], note=note)
        print(folder / f"{picture}.png")
