"""Strategies beside each other on this machine, at several link rates, with what models and simulator say of each.

    python benchmarks/strategies_report.py                                   # every strategy, three link rates
    python benchmarks/strategies_report.py --strategies ondemand,moelens --links 0.5 --repeats 1
    python benchmarks/strategies_report.py --out results/reference/strategies-emulated -- dataset=mtbench_lightning

Runs are ordinary ones (tokens verified, W&B disabled), interleaved: every strategy at a link rate, then the next rate,
and all of it again for each repeat; medians count. What follows `--` is given to every run. `observed` numbers are
`emulated`: a core plays the GPU, links and the cpu lane are held to stated rates. `predicted` is what the strategy's
paper says, `simulated` the simulator with the costs measured on this computer.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.support.runs import Row, report, run  # noqa: E402
from harness.command_line import composed_values  # noqa: E402
from harness.plan import make_plan  # noqa: E402
from harness.record.summary import accuracy  # noqa: E402

LINKS_GB_S = (0.3, 0.5, 1.0)


def available() -> list[str]:
    return sorted(path.stem for path in (ROOT / "conf" / "strategy").glob("*.yaml") if not path.stem.startswith("_"))


def simulated_tok_s(overrides: Sequence[str]) -> float:
    values = composed_values(["machine=simulated", *overrides, "hardware=local"])
    summary = make_plan(values, log=lambda text: None).summary
    assert summary is not None, "a simulation was asked for"
    return float(summary["throughput_tok_s"])


def rows(
    strategies: Sequence[str], links_gb_s: Sequence[float], repeats: int, common: Sequence[str], results_dir: Path
) -> Iterator[Row]:
    found: dict[tuple[str, float], list[dict[str, Any]]] = {}
    for _ in range(repeats):
        for link_gb_s in links_gb_s:
            for name in strategies:
                overrides = [f"strategy={name}", *common, f"hardware.h2d_gb_s={link_gb_s}"]
                summary, folder = run(overrides, results_dir, verify=True)
                print(f"{name}, {link_gb_s} GB/s: {summary['throughput_tok_s']:.4g} tok/s, {folder}", flush=True)
                found.setdefault((name, link_gb_s), []).append(summary)
    for link_gb_s in links_gb_s:
        floor_tok_s = median(s["throughput_tok_s"] for s in found[strategies[0], link_gb_s])
        for name in strategies:
            overrides = [f"strategy={name}", *common, f"hardware.h2d_gb_s={link_gb_s}"]
            yield _row(name, link_gb_s, found[name, link_gb_s], floor_tok_s, strategies[0], simulated_tok_s(overrides))


def _row(
    name: str, link_gb_s: float, runs: list[dict[str, Any]], floor_tok_s: float, first: str, simulated: float
) -> Row:
    rates = sorted(s["throughput_tok_s"] for s in runs)
    emulated = median(rates)
    middle = min(runs, key=lambda s: abs(s["throughput_tok_s"] - emulated))
    predicted, busy = middle["predicted_throughput_tok_s"], middle["utilization"]
    busiest = max(busy, key=lambda lane: busy[lane])
    return {
        "strategy": name,
        "h2d_gb_s": link_gb_s,
        "emulated_tok_s": emulated,
        f"ratio_to_{first}": emulated / floor_tok_s,
        "spread": (rates[-1] - rates[0]) / emulated,
        "passes": middle["num_passes"],
        "busiest_lane": busiest,
        "busiest_share": busy[busiest],
        "gpu_busy": busy["gpu"],
        "cpu_busy": busy["cpu"],
        "h2d_busy": busy["h2d"],
        "predicted_tok_s": predicted,
        "predicted_accuracy": None if predicted is None else accuracy(predicted, emulated),
        "simulated_tok_s": simulated,
        "simulated_error": simulated / emulated - 1,
        "gpu_lane_without_core": middle["stolen_core_share"],
        "host_steal": middle["host_steal_share"],
    }


def main() -> None:
    given = sys.argv[1:]
    at = given.index("--") if "--" in given else len(given)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--strategies", default=None, help="comma-separated; ratios are to the first (default: all)")
    parser.add_argument("--links", default=",".join(map(str, LINKS_GB_S)), help="GB/s, comma-separated")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=None, help="folder for strategies.json and strategies.md")
    parser.add_argument("--results-dir", type=Path, default=ROOT / "results", help="where run folders go")
    args = parser.parse_args(given[:at])
    strategies = args.strategies.split(",") if args.strategies else sorted(available(), key=lambda n: n != "ondemand")
    links = [float(link) for link in args.links.split(",")]
    made = rows(strategies, links, args.repeats, given[at + 1 :], args.results_dir)
    report("strategies", made, args.out, script="benchmarks/strategies_report.py", arguments=given, label="emulated")


if __name__ == "__main__":
    main()
