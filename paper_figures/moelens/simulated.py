"""Show what `paper_figures.moelens.simulate` found: a table, and MoE-Lens Fig. 11 (one panel) and 13 as simulated.

`python -m paper_figures.moelens.simulated` writes summary.json and summary.md beside the runs. Reads results/ only.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.cli.arguments import CommandParser
from harness.interrupts import exit_code
from harness.model.cache import make_writable
from harness.record.summary import accuracy
from paper_figures.reports import made_by
from paper_figures.support import REFERENCE, markdown_table, new_figure, read_json, write_json

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FOLDER = REFERENCE / "moelens-simulated"
NOTE = (
    "Mixtral-8x7B, A40 held to 16 GB, MTBench lengths (synthetic prompts); rates of conf/hardware/a40.yaml; "
    "predicted: Eq. 8-14"
)
_LANES = ("gpu", "h2d", "cpu")
_SMOOTHED_PASSES = 5


def runs(folder: Path = FOLDER) -> list[dict[str, Any]]:
    """Read the runs, ordered by KV cache, then generation length."""
    found = [read_json(path) for path in folder.glob("kv*-g*.json")]
    return sorted(found, key=lambda run: (run["setting"]["kv_cache_gb"], run["setting"]["g"]))


def summarize(run: dict[str, Any]) -> dict[str, Any]:
    """Summarise throughput over all passes, and shares from the second pass to the last but one, as in every run's
    summary. A stall is a run of passes without prefill while requests are still waiting, so before the last prefill."""
    p = {name: np.array(values) for name, values in run["passes"].items()}
    all_s, steady_s = p["end_s"][-1] - p["start_s"][0], p["end_s"][-2] - p["end_s"][0]
    steady = slice(1, -1)
    tokens = p["num_prefill_tokens"] + p["num_decode_tokens"]
    throughput = float(p["generated_tokens"].sum() / all_s)
    predicted = run["prediction"]["throughput_tok_s"]
    processed = tokens[steady].sum() / steady_s
    return {
        **run["setting"],
        "throughput_tok_s": throughput,
        "predicted_tok_s": predicted,
        "accuracy": accuracy(predicted, throughput),
        "steady_tok_s": float(p["generated_tokens"][steady].sum() / steady_s),
        **{f"{lane}_busy": float(p[f"{lane}_busy_s"][steady].sum() / steady_s) for lane in _LANES},
        "gpu_busy_while_requests_wait": _while_waiting(p),
        "tokens_over_t_gpu": float(processed / run["gpu_tok_s"]),
        "tokens_over_t_gpu_peak": float(processed / run["gpu_peak_tok_s"]),
        "preemptions": int(p["num_preemptions"].sum()),
        **_stalls(p["num_prefill_tokens"]),
        **_decoding(p["num_decode_tokens"], p["num_prefill_tokens"]),
        "num_passes": len(tokens),
        "predicted_passes": run["prediction"]["terms"]["passes"],
        "pass_s": float(all_s / len(tokens)),
        "h2d_s_a_pass": [float(np.percentile(p["h2d_busy_s"][steady], q)) for q in (5, 50, 95)],
        "n_real": run["plan"]["n_real"],
    }


def _waiting(prefill: np.ndarray) -> int:
    """Count the passes up to the last prefill: as long as there is anything to admit."""
    return int(np.flatnonzero(prefill)[-1]) + 1


def _while_waiting(p: dict[str, np.ndarray]) -> float:
    """Return the GPU's busy share from the second pass to the last that prefills: without the drain at the end."""
    last = _waiting(p["num_prefill_tokens"])
    return float(p["gpu_busy_s"][1:last].sum() / (p["end_s"][last - 1] - p["end_s"][0]))


def _stalls(prefill: np.ndarray) -> dict[str, Any]:
    active = prefill[: _waiting(prefill)] > 0
    starts = np.flatnonzero(active[:-1] & ~active[1:]) + 1
    return {
        "share_of_passes_without_prefill": float(1 - active.mean()),
        "num_stalls": len(starts),
        "passes_between_stalls": float(np.diff(starts).mean()) if len(starts) > 1 else None,
    }


def _decoding(decode: np.ndarray, prefill: np.ndarray) -> dict[str, Any]:
    """Measure how far the number of decoding sequences swings, in the second half of the time with requests waiting."""
    middle = decode[_waiting(prefill) // 2 : _waiting(prefill)]
    low, high = (float(np.percentile(middle, q)) for q in (5, 95))
    return {"decoding_low": low, "decoding_high": high}


def tokens_a_second(run: dict[str, Any], name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return (progress in seconds, rate) of a column of tokens, smoothed over a few passes."""
    ends = np.array(run["passes"]["end_s"])
    lengths = np.diff(ends, prepend=run["passes"]["start_s"][0])
    kernel = np.ones(_SMOOTHED_PASSES)
    tokens = np.convolve(run["passes"][name], kernel, "same")
    return ends - run["passes"]["start_s"][0], tokens / np.convolve(lengths, kernel, "same")


def compute() -> dict[str, Any]:
    found = runs()
    return {"label": "simulated", "rows": [summarize(run) for run in found], "runs": found}


def markdown(rows: list[dict[str, Any]]) -> str:
    """Write the columns that compare with the paper."""
    columns = {
        "KV GB": lambda r: f"{r['kv_cache_gb']:g}",
        "g": lambda r: str(r["g"]),
        "K": lambda r: f"{r['num_requests']:,}" + _share(r),
        "simulated tok/s": lambda r: f"{r['throughput_tok_s']:.0f}",
        "predicted tok/s": lambda r: f"{r['predicted_tok_s']:.0f}",
        "accuracy": lambda r: f"{r['accuracy']:.1%}",
        "steady tok/s": lambda r: f"{r['steady_tok_s']:.0f}",
        "GPU busy": lambda r: f"{r['gpu_busy']:.0%}",
        "before the drain": lambda r: f"{r['gpu_busy_while_requests_wait']:.0%}",
        "tokens/T_GPU": lambda r: f"{r['tokens_over_t_gpu']:.0%}",
        "link busy": lambda r: f"{r['h2d_busy']:.0%}",
        "CPU busy": lambda r: f"{r['cpu_busy']:.0%}",
        "passes": lambda r: f"{r['num_passes']:,}",
        "predicted": lambda r: f"{r['predicted_passes']:,.0f}",
        "s a pass": lambda r: f"{r['pass_s']:.2f}",
        "preemptions": lambda r: f"{r['preemptions']:,}",
        "without prefill": lambda r: f"{r['share_of_passes_without_prefill']:.0%}",
        "stalls": lambda r: str(r["num_stalls"]),
        "apart": lambda r: "-" if r["passes_between_stalls"] is None else f"{r['passes_between_stalls']:.0f}",
        "decoding 5-95 %": lambda r: f"{r['decoding_low']:,.0f}-{r['decoding_high']:,.0f}",
    }
    return "# MoE-Lens on an A40 (simulated)\n\n" + markdown_table(columns, rows)


def _share(row: dict[str, Any]) -> str:
    share = row["num_requests"] / row["paper_num_requests"]
    return "" if share > 0.999 else f" ({share:.0%} of the paper's K)"


def draw_fig11(data: dict[str, Any]) -> Figure:
    figure = new_figure(6.4, 3.6)
    axes = figure.subplots()
    for number, (kv_gb, rows) in enumerate(groupby(data["rows"], key=lambda row: row["kv_cache_gb"])):
        colour, members = f"C{number}", list(rows)
        lengths = [row["g"] for row in members]
        axes.plot(lengths, [row["throughput_tok_s"] for row in members], "o-", color=colour,
                  label=f"{kv_gb:g} GB, simulated")  # fmt: skip
        axes.plot(lengths, [row["predicted_tok_s"] for row in members], "x--", color=colour,
                  label=f"{kv_gb:g} GB, predicted (Stage 2)")  # fmt: skip
        for row in members:
            if share := _share(row):
                axes.annotate(share.strip(), (row["g"], row["throughput_tok_s"]), xytext=(-4, -12),
                              textcoords="offset points", fontsize=7, ha="right")  # fmt: skip
    axes.set(xscale="log", xlabel="generated tokens g", ylabel="generated tokens / s", ylim=(0, None))
    lengths = sorted({row["g"] for row in data["rows"]})
    axes.set_xticks(lengths, [str(g) for g in lengths])
    axes.minorticks_off()
    axes.set_title("Generation throughput, as in MoE-Lens Fig. 11 (Mixtral-8x7B, MTBench)")
    axes.legend(loc="best")
    return figure


def draw_fig13(data: dict[str, Any]) -> Figure:
    """Draw a row with tokens a second for each KV cache, then each lane's busy time in every pass."""
    lengths = sorted({row["g"] for row in data["rows"]})
    caches = sorted({row["kv_cache_gb"] for row in data["rows"]})
    figure = new_figure(3.0 * len(lengths), 2.1 * 2 * len(caches))
    grid = figure.subplots(2 * len(caches), len(lengths), squeeze=False)
    rows = {(row["kv_cache_gb"], row["g"]): row for row in data["rows"]}
    for axes in grid.flat:
        axes.set_visible(False)
    for run in data["runs"]:
        kv_gb, g = run["setting"]["kv_cache_gb"], run["setting"]["g"]
        top = grid[2 * caches.index(kv_gb)][lengths.index(g)]
        bottom = grid[2 * caches.index(kv_gb) + 1][lengths.index(g)]
        for axes, draw in ((top, _draw_tokens), (bottom, _draw_times)):
            axes.set_visible(True)
            draw(axes, run)
        row = rows[kv_gb, g]
        top.set_title(f"{kv_gb:g} GB, g = {g}\nGPU {row['gpu_busy']:.0%} busy{_share(row)}", fontsize=9)
    for number in range(len(caches)):
        grid[2 * number][0].set_ylabel("tokens / s")
        grid[2 * number + 1][0].set_ylabel("busy s a pass")
    for axes in grid[:2, 0]:
        axes.legend(loc="upper right", fontsize=7, ncols=3)
    for axes in grid[-1]:
        axes.set_xlabel("time, 1000 s")
    return figure


def _draw_tokens(axes: Any, run: dict[str, Any]) -> None:
    for name, label in (("num_prefill_tokens", "prefill"), ("num_decode_tokens", "decode")):
        seconds, rate = tokens_a_second(run, name)
        axes.plot(seconds / 1000, rate, linewidth=0.9, label=label)
    axes.set_ylim(0, 1.3 * run["gpu_tok_s"])
    axes.axhline(run["gpu_tok_s"], color="0.5", linewidth=0.7, linestyle=":", label="T_GPU")


def _draw_times(axes: Any, run: dict[str, Any]) -> None:
    seconds = (np.array(run["passes"]["end_s"]) - run["passes"]["start_s"][0]) / 1000
    for lane, label in (("h2d", "link"), ("gpu", "GPU"), ("cpu", "CPU attention")):
        axes.plot(seconds, run["passes"][f"{lane}_busy_s"], linewidth=0.9, label=label)
    axes.set_ylim(0, 8)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = CommandParser("paper_figures.moelens.simulated", __doc__)
    parser.add_argument("--out", type=Path, default=FOLDER, metavar="FOLDER", help="default: beside the runs")
    return parser.run(_summarize, arguments)


def _summarize(given: Namespace) -> int:
    make_writable(given.out, "--out")  # before the work
    rows = compute()["rows"]
    command = "python -m paper_figures.moelens.simulated"
    write_json(given.out / "summary.json", {**made_by(command), "label": "simulated", "rows": rows})
    text = markdown(rows)
    (given.out / "summary.md").write_text(text, encoding="utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
