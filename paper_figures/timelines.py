"""Draw timelines of recorded runs, one below the other on one scale: `python -m paper_figures.timelines RUN_FOLDER
...`.

Shows a few neighbouring layers of one decode pass in the middle of each run, every lane a row, every slice a packet as
it was recorded. `--layers` says how many, `--out` where the picture goes. Numbers go to a JSON file beside it first.
"""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.cli.arguments import CommandParser, whole_number
from harness.config import ConfigError
from harness.interrupts import exit_code
from harness.machine.base import Span
from harness.model.cache import make_writable
from harness.record.spans import lane_order
from harness.record.trace import TraceError, read_trace
from paper_figures.support import FIGURES, new_figure, read_json, save, write_json

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLOURS = {
    "weights": "#c9c2e6", "weights to pinned": "#e3dff3", "load kv": "#7fc97f", "load attention": "#33a02c",
    "offload qkv": "#b2df8a", "decode attention": "#f28e2b", "append kv": "#ffd29b",
    "decode attention (device)": "#d9731a", "attention in": "#86bcec",
    "attention out": "#3d7fbf", "experts": "#1f4e8c", "combine": "#9fb6d0", "prefill attention": "#e15759",
}  # fmt: skip
_OTHER = "#bab0ac"
_WIDE = 0.018  # of the time shown: a slice that takes a letter and a number
_SUBSCRIPT = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")
_NAMES = ("strategy", "model", "hardware")
_ROW_INCHES, _FRAME_INCHES = 0.24, 0.62


def window(folder: Path, num_layers: int) -> dict[str, Any]:
    """Read the spans of `num_layers` layers in the middle of a decode pass of the run in `folder`; times in ms.

    The window lasts from the gpu lane's first op of the first layer until its first op of the layer behind the last
    one; what other lanes do meanwhile may belong to other layers.
    """
    trace = folder / "trace.json"
    if not trace.is_file():
        raise ConfigError(str(folder), "not the folder of a run that ended (it has no trace.json)")
    spans = read_trace(trace)
    first_s, last_s, layers = _middle(_decode_pass(folder), spans, num_layers)
    rows: dict[str, list[list[Any]]] = {}
    for span in sorted(spans, key=lambda s: (lane_order(s.lane), s.start_s)):
        if span.end_s > first_s and span.start_s < last_s:
            start_s, end_s = max(span.start_s, first_s) - first_s, min(span.end_s, last_s) - first_s
            entry = [span.kind, span.layer, span.micro_batch, round(start_s * 1e3, 4), round(end_s * 1e3, 4)]
            rows.setdefault(str(span.lane), []).append(entry)
    summary = read_json(folder / "summary.json")
    return {
        "label": summary["label"],
        **{name: summary[name] for name in _NAMES},
        "run": folder.name,
        "layers": layers,
        "length_ms": round((last_s - first_s) * 1e3, 4),
        "lanes": rows,  # kind, layer, micro-batch, start, end in ms
    }


def _decode_pass(folder: Path) -> Mapping[str, Any]:
    passes = [json.loads(line) for line in (folder / "passes.jsonl").read_text(encoding="utf-8").splitlines()]
    decoding = [p for p in passes if p["num_decode_tokens"] and not p["num_prefill_tokens"]] or passes[1:]
    if not decoding:
        raise ConfigError(str(folder), "a run of one pass has no pass that decodes")
    return dict(decoding[len(decoding) // 2])


def _middle(record: Mapping[str, Any], spans: Sequence[Span], num_layers: int) -> tuple[float, float, list[int]]:
    """Find where the window begins and ends, and the layers in it."""
    first_start_s: dict[int, float] = {}
    for span in spans:
        inside = record["start_s"] <= span.start_s < record["end_s"]
        if inside and span.lane.kind == "gpu" and span.layer is not None and span.kind != "attention in":
            first_start_s[span.layer] = min(span.start_s, first_start_s.get(span.layer, span.start_s))
    layers = sorted(first_start_s)
    num_layers = min(num_layers, len(layers) - 1)
    if num_layers < 1:
        raise ConfigError("model", "must have two layers or more, for a timeline")
    begin = (len(layers) - num_layers) // 2
    chosen = layers[begin : begin + num_layers + 1]
    return first_start_s[chosen[0]], first_start_s[chosen[-1]], chosen[:-1]


def draw(windows: Sequence[Mapping[str, Any]], *, letters: Mapping[str, str] | None = None) -> Figure:
    """Draw one block a run, all on one time scale. `letters` by kind of op stand, with the micro-batch, in wide
    slices."""
    from matplotlib.patches import Patch

    heights = [len(w["lanes"]) for w in windows]
    figure = new_figure(9.0, _FRAME_INCHES * (len(windows) + 1) + _ROW_INCHES * sum(heights))
    blocks = figure.subplots(len(windows), 1, sharex=True, height_ratios=[h + 1 for h in heights], squeeze=False)[:, 0]
    kinds: dict[str, None] = {}
    differing = [name for name in _NAMES[1:] if len({w.get(name) for w in windows}) > 1]
    titles = [" · ".join((data["strategy"], *(data[name] for name in differing))) for data in windows]
    if len(set(titles)) < len(titles):
        titles = [f"{title} · {data['run'].rsplit('-', 1)[-1]}" for title, data in zip(titles, windows, strict=True)]
    wide_ms = _WIDE * max(w["length_ms"] for w in windows)
    for axes, data, title in zip(blocks, windows, titles, strict=True):
        for row, entries in enumerate(data["lanes"].values()):
            for kind, _, batch, start_ms, end_ms in entries:
                axes.broken_barh(
                    [(start_ms, end_ms - start_ms)], (row - 0.42, 0.84), facecolor=_COLOURS.get(kind, _OTHER),
                    edgecolor="white", linewidth=0.3, hatch="///" if not letters and (batch or 0) % 2 else None,
                )  # fmt: skip
                kinds[kind] = None
                if end_ms - start_ms > wide_ms and (letter := (letters or {}).get(kind)):
                    _write(
                        axes,
                        (start_ms + end_ms) / 2,
                        row,
                        letter if batch is None else letter + str(batch + 1).translate(_SUBSCRIPT),
                    )
        busy = [sum(e[4] - e[3] for e in entries) / data["length_ms"] for entries in data["lanes"].values()]
        names = [f"{lane} {share:.0%}" for lane, share in zip(data["lanes"], busy, strict=True)]
        axes.set_yticks(range(len(names)), names)
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.grid(visible=False)
        layers = data["layers"]
        shown = f"layer {layers[0]}" if len(layers) == 1 else f"layers {layers[0]} to {layers[-1]}"
        axes.set_title(f"{title}: {shown} in {data['length_ms']:.3g} ms [{data['label']}]", loc="left")
    blocks[-1].set_xlabel("ms; percent: of the window" + ("" if letters else "; hatched: odd micro-batches"))
    blocks[-1].set_xlim(0, max(w["length_ms"] for w in windows))
    named = [kind for kind in _COLOURS if kind in kinds] + ([""] if kinds.keys() - _COLOURS.keys() else [])
    patches = [Patch(color=_COLOURS.get(kind, _OTHER), label=kind or "other") for kind in named]
    figure.legend(handles=patches, loc="outside upper center", ncols=6)
    return figure


def _write(axes: Any, x: float, y: float, text: str) -> None:
    box = {"boxstyle": "round,pad=0.1", "color": "white", "alpha": 0.75}
    axes.text(x, y, text, fontsize=6.5, ha="center", va="center", bbox=box)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = CommandParser("paper_figures.timelines", __doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN_FOLDER")
    parser.add_argument("--layers", type=whole_number(1), default=2, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--out", type=Path, default=FIGURES / "timelines.png", metavar="FILE.png")
    return parser.run(_draw, arguments, TraceError, OSError)


def _draw(given: Namespace) -> int:
    make_writable(given.out.parent, "--out")  # before traces are read
    windows = [window(folder, given.layers) for folder in given.runs]
    path = given.out.with_suffix(".json")
    write_json(path, {"windows": windows})
    labels = sorted({w["label"] for w in windows})
    save(draw(read_json(path)["windows"]), given.out, label=", ".join(labels), note="packets as recorded in trace.json")
    print(given.out)
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
