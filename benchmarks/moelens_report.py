"""Measure MoE-Lens on this machine: its speed-up over no overlap, how close it gets to the busiest lane, and Stage 2.

    python benchmarks/moelens_report.py                       # everything, about 20 minutes on 2 cores
    python benchmarks/moelens_report.py --only balanced       # one part: speedup, balanced, stage2
    python benchmarks/moelens_report.py --out results/reference/moelens-emulated

Runs are ordinary runs (verification off, W&B disabled) in this process, one after another; the report gathers their
summaries. Every number is `emulated`: a core plays the GPU, links and the cpu lane are held to stated rates.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.support.runs import lane_times, report, run  # noqa: E402
from harness.cli.arguments import CommandParser  # noqa: E402

SPEEDUP = {
    "ondemand": ["strategy=ondemand"],
    "moelens": ["strategy=moelens"],
    "moelens, sequential pipeline": ["strategy=moelens", "strategy.pipeline=sequential"],
    "moelens, phases apart": ["strategy=moelens", "strategy.overlap_prefill_decode=false"],
    "moelens, attention on the gpu lane": ["strategy=moelens", "strategy.attention=gpu"],
}
# (generation length, KV cache in GB, requests, link in GB/s); K is 5 g q, as in the paper, where the cache binds
STAGE2 = [
    (8, 0.010, 130, 0.5),
    (8, 0.020, 260, 0.5),
    (8, 0.010, 130, 0.7),
    (8, 0.020, 260, 0.7),
    (8, 0.005, 65, 0.5),
    (16, 0.010, 135, 0.7),
    (8, 0.010, 130, 0.4),
    (8, 0.020, 260, 0.4),
    (8, 0.005, 65, 0.7),
    (8, 0.040, 520, 0.7),
    (16, 0.005, 65, 0.7),
    (16, 0.020, 265, 0.7),
    (8, 0.010, 130, 1.0),
    (16, 0.010, 135, 1.0),
    (8, 0.005, 65, 1.0),
]
LOW_ACCURACY = 0.8  # settings below it are listed apart, with what the equations got wrong


def speedup(results_dir: Path) -> Iterator[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for name, overrides in SPEEDUP.items():
        summary, _ = run(overrides, results_dir)
        times = lane_times(summary)
        rows.append(
            {
                "setting": name,
                "throughput_tok_s": summary["throughput_tok_s"],
                "num_passes": summary["num_passes"],
                "ratio_to_first": summary["throughput_tok_s"]
                / (rows[0]["throughput_tok_s"] if rows else summary["throughput_tok_s"]),
                "sum_over_longest_lane": sum(times.values()) / max(times.values()),
                "busiest_lane": max(times, key=lambda lane: times[lane]),
                "busiest_share": max(summary["utilization"].values()),
                "gpu_lane_without_core": summary["stolen_core_share"],
                "host_steal": summary["host_steal_share"],
            }
        )
        yield rows[-1]


def balanced(results_dir: Path) -> Iterator[dict[str, Any]]:
    """Measure with gpu and h2d within a factor of two of each other: steady time over the busiest lane's work."""
    rows: list[dict[str, Any]] = []
    for link_gb_s in (0.55, 0.65):
        summary, _ = run(["experiment=balanced", f"hardware.h2d_gb_s={link_gb_s}"], results_dir)
        times = lane_times(summary)
        # The link's work by its stated rate: a transfer that contention stretches is busy for longer than it should be.
        link_s = summary["h2d_gb_s"] / link_gb_s * summary["window_s"]
        rows.append(
            {
                "h2d_gb_s": link_gb_s,
                "gpu_s": times["gpu"],
                "h2d_s": times["h2d"],
                "gpu_over_h2d": times["gpu"] / times["h2d"],
                "window_s": summary["window_s"],
                "time_over_busiest_lane": summary["window_s"] / max(times.values()),
                "time_over_link_bytes_at_rate": summary["window_s"] / link_s,
                "gpu_lane_without_core": summary["stolen_core_share"],
                "host_steal": summary["host_steal_share"],
            }
        )
        yield rows[-1]


def stage2(results_dir: Path) -> Iterator[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for g, kv_gb, num_requests, link_gb_s in STAGE2:
        summary, _ = run(
            [
                f"dataset.max_new_tokens={g}",
                f"dataset.num_requests={num_requests}",
                f"kv_cache_gb={kv_gb}",
                f"hardware.h2d_gb_s={link_gb_s}",
            ],
            results_dir,
        )
        terms = summary["prediction"]["terms"]
        rows.append(
            {
                "g": g,
                "kv_cache_gb": kv_gb,
                "K": num_requests,
                "h2d_gb_s": link_gb_s,
                "n_real": summary["plan"]["n_real"],
                "q": terms["q"],
                "bound": summary["prediction"]["model"],
                "predicted_passes": terms["passes"],
                "passes": summary["num_passes"],
                "predicted_pass_s": terms["delta_s"],
                "pass_s": summary["generation_s"] / summary["num_passes"],
                "pass_tokens_over_n_real": (summary["prompt_tokens"] + summary["generated_tokens"] - num_requests)
                / summary["num_passes"]
                / summary["plan"]["n_real"],
                "preemptions": summary["preemptions"],
                "predicted_tok_s": summary["predicted_throughput_tok_s"],
                "emulated_tok_s": summary["throughput_tok_s"],
                "accuracy": summary["prediction_accuracy"],
                "gpu_lane_without_core": summary["stolen_core_share"],
                "host_steal": summary["host_steal_share"],
            }
        )
        yield rows[-1]


def accuracy_text(rows: list[dict[str, Any]]) -> str:
    """Tell mean and spread of the accuracies, and for each low one the two factors that make it up."""
    accuracies = [row["accuracy"] for row in rows]
    low = [row for row in rows if row["accuracy"] < LOW_ACCURACY]
    lines = [
        f"{len(rows)} settings: mean accuracy {sum(accuracies) / len(rows):.1%}, lowest {min(accuracies):.1%}; "
        f"below {LOW_ACCURACY:.0%}: {len(low)}."
    ]
    lines += [
        f"- g={row['g']}, {row['kv_cache_gb']} GB of KV cache, {row['h2d_gb_s']} GB/s: {row['accuracy']:.1%}. "
        f"{row['passes'] / row['predicted_passes']:.2f} times the predicted passes (a pass held "
        f"{row['pass_tokens_over_n_real']:.0%} of n_real), {row['pass_s'] / row['predicted_pass_s']:.2f} times the "
        "predicted time each."
        for row in low
    ]
    return "\n".join(lines)


PARTS = {"speedup": speedup, "balanced": balanced, "stage2": stage2}


def main(arguments: Sequence[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else list(arguments)
    parser = CommandParser("benchmarks/moelens_report.py", __doc__)
    parser.add_argument("--only", choices=sorted(PARTS), action="append", help="parts to run (default: all)")
    parser.add_argument("--out", type=Path, default=None, help="folder for <part>.json and <part>.md")
    parser.add_argument("--results-dir", type=Path, default=ROOT / "results", help="where run folders go")
    return parser.run(partial(measure, given=given), given)


def measure(args: Namespace, given: list[str]) -> int:
    for part in args.only or PARTS:
        report(
            part, PARTS[part](args.results_dir), args.out, script="benchmarks/moelens_report.py",
            arguments=given, label="emulated", **({"comment": accuracy_text} if part == "stage2" else {}),
        )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
