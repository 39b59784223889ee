"""Put a sweep of emulated runs into a table: `python -m paper_figures.prescope.emulated FOLDER ... [--out FOLDER]`.

    python run.py -m strategy=prescope,ondemand,moelens,moegen_h model=mixtral-mini,qwen3-mini \\
        hardware.h2d_gb_s=0.3,0.7,1.5 repeats=3 results_dir=FOLDER

Writes emulated.json, a row for each run, and emulated.md, with medians over the repeats of each configuration.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from harness.cli.arguments import CommandParser
from harness.config import ConfigError
from harness.interrupts import exit_code
from harness.machine.base import H2D
from harness.model.cache import make_writable
from harness.record.activity import moved_bytes
from harness.record.files import RecordError
from harness.record.store import Run, list_runs
from harness.record.trace import TraceError, read_trace
from paper_figures.passes import records_of
from paper_figures.prescope.gap import decode_windows_s, gaps_s, layer_times_s
from paper_figures.support import REFERENCE, markdown_table, read_json, write_json

FOLDER = REFERENCE / "prescope-emulated"
_NAMED = ("strategy", "model", "weights", "link_gb_s", "predictions")  # what tells configurations apart
_WAYS = ("resident", "prefetched", "cached", "on_demand", "cpu")
Row = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = CommandParser("paper_figures.prescope.emulated", __doc__)
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER", help="results_dir of the runs")
    parser.add_argument("--out", type=Path, default=FOLDER, metavar="FOLDER", help="default: %(default)s")
    return parser.run(_report, arguments, RecordError, TraceError)


def _report(given: Namespace) -> int:
    path = given.out / "emulated.json"
    if not given.folders and not path.is_file():
        raise ConfigError("FOLDER", f"{given.out}: has no emulated.json yet; name the results_dir of runs")
    make_writable(given.out, "--out")  # before traces are read
    if given.folders:
        runs = [run for folder in given.folders for run in list_runs(folder)]
        rows = [row(run) for run in runs if run.status == "ok"]
        if not rows:
            raise ConfigError("FOLDER", "no run has ended well in " + ", ".join(map(str, given.folders)))
        write_json(path, {"rows": rows, "failed": [f"{r.run_id}: {r.error}" for r in runs if r.status != "ok"]})
    (given.out / "emulated.md").write_text(tables(read_json(path)), encoding="utf-8")
    print(given.out / "emulated.md")
    return 0


def row(run: Run) -> Row:
    """Take what the report needs from a run's records. Its gaps are those of layers in decode; experts and bytes are
    counted over all passes."""
    config, summary = run.config, run.summary
    assert summary is not None, "a run that ended well has a summary"
    passes = records_of(run)
    trace = next(run.folder.glob("trace.json*"))
    spans, whole = read_trace(trace), (min(p.start_s for p in passes), max(p.end_s for p in passes))
    times_s = layer_times_s(spans, decode_windows_s(passes))
    found_s = gaps_s(times_s, with_link=True)
    latency, counted = summary["latency"], summary["counted"]
    return {
        "strategy": summary["strategy"],
        "model": summary["model"],
        "weights": summary["weights_source"],
        "link_gb_s": config["hardware"]["h2d_gb_s"],
        "predictions": summary["plan"].get("predictions", "none"),
        "label": summary["label"],
        "seed": config["seed"],
        "code": run.meta["code_version"],
        "tok_s": summary["throughput_tok_s"],
        **{name: {p: latency[name][p] for p in ("p50", "p90")} for name in ("ttft_s", "tpot_s", "e2e_s")},
        "itl_s": {p: latency["itl_s"][p] for p in ("p50", "p99")},
        "h2d_bytes": moved_bytes(spans, H2D, whole),
        "busy": {lane: summary["utilization"][lane] for lane in ("gpu", "cpu", "h2d")},
        "counted": {
            name: counted[name] for name in (*_WAYS, "active", "issued", "withdrawn", "wasted_bytes") if counted
        },
        "gap_s": {str(share): float(np.percentile(found_s, share)) for share in (50, 90) if counted and found_s},
        "verified": f"{summary['verify']['checked']} checked, {summary['verify']['mismatched']} mismatched",
        "without_core": summary["stolen_core_share"],
        "disturbed": summary["disturbed"],
    }


def _model(found: Row) -> str:
    """Name the model; where it is a checkpoint, by its folder."""
    return str(found["model"] if found["model"] != "checkpoint" else found["weights"].split(",")[0].split()[-1])


def _system(found: Row) -> str:
    """Name the strategy, and what predicts for PreScope where it is not the gate."""
    name, predictions = str(found["strategy"]), found["predictions"]
    if name == "prescope" and predictions == "none":
        return f"{name}, no predictions"
    return f"{name}, LLaPor" if predictions.startswith("learned") else name


def tables(data: Mapping[str, Any]) -> str:
    """Write medians over repeats; a range is from the least to the most. What rows of earlier code lack is a dash."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for each in data["rows"]:
        groups.setdefault(tuple(each[name] for name in _NAMED), []).append(each)
    labels = " and ".join(sorted({each["label"] for each in data["rows"]}))

    def middle(group: Sequence[Row], value: Callable[[Row], float], scale: float = 1.0) -> str:
        return f"{scale * median(map(value, group)):.3g}"

    def lately(group: Sequence[Row], name: str, text: Callable[[Sequence[Row]], str]) -> str:
        return "-" if any(each.get(name) is None for each in group) else text(group)

    def counted(group: Sequence[Row], way: str) -> str:
        if not group[0]["counted"]:
            return "-"
        return f"{median(each['counted'][way] / each['counted']['active'] for each in group):.0%}"

    def rate(group: Sequence[Row]) -> str:
        found = sorted(each["tok_s"] for each in group)
        return f"{median(found):.3g} ({found[0]:.3g}-{found[-1]:.3g})"

    columns: dict[str, Any] = {
        "model": lambda g: _model(g[0]),
        "link GB/s": lambda g: f"{g[0]['link_gb_s']:g}",
        "strategy": lambda g: _system(g[0]),
        "runs": lambda g: str(len(g)),
        "tok/s": rate,
        "ms a token": lambda g: middle(g, lambda r: r["tpot_s"]["p50"], 1e3),
        "p90": lambda g: middle(g, lambda r: r["tpot_s"]["p90"], 1e3),
        "ms between tokens, p50 / p99": lambda g: lately(
            g, "itl_s", lambda g: " / ".join(middle(g, lambda r, p=p: r["itl_s"][p], 1e3) for p in ("p50", "p99"))
        ),
        "latency s": lambda g: middle(g, lambda r: r["e2e_s"]["p50"]),
    }
    columns |= {way.replace("_", " "): lambda g, way=way: counted(g, way) for way in _WAYS}
    columns |= {
        "h2d MB": lambda g: lately(g, "h2d_bytes", lambda g: middle(g, lambda r: r["h2d_bytes"], 1e-6)),
        "wasted MB": lambda g: middle(g, lambda r: r["counted"]["wasted_bytes"], 1e-6) if g[0]["counted"] else "-",
        "gap ms, 50 / 90 % of layers": lambda g: (
            " / ".join(middle(g, lambda r, share=share: r["gap_s"][share], 1e3) for share in g[0]["gap_s"]) or "-"
        ),
        **{
            f"{lane} busy": lambda g, lane=lane: f"{median(r['busy'][lane] for r in g):.0%}"
            for lane in ("gpu", "cpu", "h2d")
        },
        "gpu without a core": lambda g: lately(
            g, "without_core", lambda g: f"{median(r['without_core'] for r in g):.0%}"
        ),
        "disturbed": lambda g: str(sum(r["disturbed"] is not None for r in g)),
        "tokens of a run": lambda g: ", ".join(sorted({r["verified"] for r in g})),
    }
    ordered = sorted(groups.values(), key=lambda g: (g[0]["model"], g[0]["weights"], g[0]["link_gb_s"]))
    weights = "".join(f"* weights: {text}\n" for text in sorted({r["weights"] for r in data["rows"]}))
    told = "".join(
        f"* PreScope predicts by {text}\n" for text in sorted({r["predictions"] for r in data["rows"]} - {"none"})
    )
    code = ", ".join(sorted({r["code"] for r in data["rows"]}))
    failed = "".join(f"* failed: {text}\n" for text in data.get("failed", []))
    return (
        f"# PreScope beside other systems ({labels})\n\n{markdown_table(columns, ordered)}\n"
        "Medians over the runs of a row. Active experts by where they ran and the bytes of the link are counts of the "
        "whole run; the gap is that in a layer of decode between CPU and GPU with its transfers. Of the steady window "
        "are the busy shares of lanes, and the share of the gpu lane's time in which its thread had no core.\n\n"
        f"{weights}{told}* code: {code}\n{failed}"
    )


if __name__ == "__main__":
    sys.exit(exit_code(main))
