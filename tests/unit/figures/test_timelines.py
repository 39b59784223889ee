"""Timelines show what a trace recorded: the right layers, the right times, every lane."""

from __future__ import annotations

import json
from dataclasses import asdict

import numpy as np
import pytest

from harness.machine.base import CPU, GPU, H2D, Span, Work
from harness.record.passes import PassRecord
from harness.record.trace import write_trace
from paper_figures import timelines

NUM_LAYERS, LAYER_S = 4, 0.1


def span(lane, kind, layer, start_s, end_s):
    return Span(lane, kind, layer, None, 0, 0, 1, False, start_s, end_s, 0.0, Work())


@pytest.fixture
def run_folder(tmp_path):
    """Passes of 0.4 s: one of prefill, then three of decode; each layer's gpu work is the first half of its 0.1 s."""
    spans = []
    for number in range(4):
        for layer in range(NUM_LAYERS):
            start_s = 10 + number * NUM_LAYERS * LAYER_S + layer * LAYER_S
            spans.append(span(GPU, "experts", layer, start_s, start_s + LAYER_S / 2))
            spans.append(span(CPU, "decode attention", layer, start_s + LAYER_S / 2, start_s + 0.9 * LAYER_S))
            spans.append(span(H2D, "weights", (layer + 2) % NUM_LAYERS, start_s - 0.02, start_s + LAYER_S - 0.02))
    passes = [
        PassRecord(
            index=number, start_s=10 + number * 0.4, end_s=10.4 + number * 0.4,
            num_prefill_tokens=8 if number == 0 else 0, num_decode_tokens=0 if number == 0 else 4,
        )
        for number in range(4)
    ]  # fmt: skip
    write_trace(tmp_path / "trace.json", spans, passes, label="emulated")
    lines = [json.dumps({"label": "emulated", **asdict(p)}) for p in passes]
    (tmp_path / "passes.jsonl").write_text("\n".join(lines) + "\n")
    summary = {"label": "emulated", "strategy": "made up", "model": "small", "hardware": "laptop"}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    return tmp_path


def test_a_window_is_the_middle_of_a_decode_pass(run_folder):
    found = timelines.window(run_folder, 2)
    assert found["layers"] == [1, 2] and found["label"] == "emulated"
    assert found["length_ms"] == pytest.approx(200)
    assert [(kind, layer) for kind, layer, *_ in found["lanes"]["gpu"]] == [("experts", 1), ("experts", 2)]
    assert found["lanes"]["gpu"][1][3:] == pytest.approx([100, 150])


@pytest.mark.needs("matplotlib", extra="figures")
def test_runs_of_one_strategy_are_told_apart_by_what_differs(run_folder):
    one = timelines.window(run_folder, 2)
    titles = [axes.get_title(loc="left") for axes in timelines.draw([one, {**one, "model": "large"}]).axes]
    assert [title.partition(":")[0] for title in titles] == ["made up · small", "made up · large"]
    assert timelines.draw([one]).axes[0].get_title(loc="left").startswith("made up: ")


@pytest.mark.needs("matplotlib", extra="figures")
def test_odd_micro_batches_are_hatched_where_the_axis_says_so(run_folder):
    """In the pixels of the picture: a hatched slice has more than one colour inside, any other slice only its own."""
    data = timelines.window(run_folder, 2)
    entries = data["lanes"]["gpu"]
    entries[0][2], entries[1][2] = 0, 1
    figure = timelines.draw([data])
    axes = figure.axes[0]
    assert "hatched: odd micro-batches" in axes.get_xlabel()
    figure.canvas.draw()
    pixels = np.asarray(figure.canvas.buffer_rgba())[::-1]  # the first row is the lowest, as in matplotlib
    colours = []
    for *_, start_ms, end_ms in entries:  # the gpu lane is row 0, 0.84 high
        inset_ms = 0.1 * (end_ms - start_ms)
        corners = axes.transData.transform([(start_ms + inset_ms, 0.3), (end_ms - inset_ms, -0.3)]).astype(int)
        (left, low), (right, high) = corners
        inside = pixels[low:high, left:right].reshape(-1, 4)
        colours.append(len(np.unique(inside, axis=0)))
    assert colours[0] == 1 and colours[1] > 1


def test_a_folder_without_a_trace_is_named(tmp_path, capsys):
    assert timelines.main([str(tmp_path / "none"), "--out", str(tmp_path / "x.png")]) == 2
    assert "none: not the folder of a run that ended" in capsys.readouterr().err


def test_what_overlaps_the_window_is_cut_to_it(run_folder):
    weights = timelines.window(run_folder, 2)["lanes"]["h2d"]
    assert [layer for _, layer, *_ in weights] == [3, 0, 1]  # two layers ahead; the last one has just begun
    assert weights[0][3] == 0 and weights[-1][4] == pytest.approx(200)
    assert sum(end_ms - start_ms for *_, start_ms, end_ms in weights) == pytest.approx(200)


def test_more_layers_than_there_are_shows_what_is_there(run_folder):
    assert timelines.window(run_folder, 100)["layers"] == [0, 1, 2]


@pytest.mark.needs("matplotlib", extra="figures")
def test_the_picture_and_its_numbers(run_folder):
    out = run_folder / "out.png"
    assert timelines.main([str(run_folder), str(run_folder), "--out", str(out)]) == 0
    assert out.stat().st_size > 10_000
    assert len(json.loads(out.with_suffix(".json").read_text())["windows"]) == 2


def test_what_is_no_run_folder_is_named(tmp_path, capsys):
    assert timelines.main([str(tmp_path / "missing")]) == 2
    assert "missing" in capsys.readouterr().err
