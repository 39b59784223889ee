"""MoE-Lens on this machine: speed-up over no overlap, how close to the busiest lane, and Stage 2's accuracy.

    python benchmarks/moelens_report.py                       # everything, about 20 minutes on 2 cores
    python benchmarks/moelens_report.py --only balanced       # one part: speedup, balanced, stage2
    python benchmarks/moelens_report.py --out results/reference/moelens-emulated

Runs are ordinary runs (verification off, W&B disabled) in this process, one after another; the report gathers their
summaries. Every number is `emulated`: a core plays the GPU, links and the cpu lane are held to stated rates.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Iterator
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from hydra import compose, initialize_config_dir  # noqa: E402
from omegaconf import OmegaConf  # noqa: E402

from harness.experiment import run_experiment  # noqa: E402
from harness.record.provenance import code_version, environment  # noqa: E402

QUIET = ["verify=off", "wandb.mode=disabled", "progress=false"]
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
]


MAX_STEAL_SHARE = 0.03  # of all cores, taken by the hypervisor while generating: above it a run says little
ATTEMPTS = 1


def run(overrides: Iterable[str], results_dir: Path) -> dict[str, Any]:
    """The summary of one run that was not disturbed, or of the least disturbed of a few."""
    tried: list[dict[str, Any]] = []
    for attempt in range(ATTEMPTS):
        time.sleep(10.0 * attempt)
        tried.append(_run(overrides, results_dir))
        if (tried[-1]["host_steal_share"] or 0.0) <= MAX_STEAL_SHARE:
            return tried[-1]
    return min(tried, key=lambda summary: summary["host_steal_share"])


def _run(overrides: Iterable[str], results_dir: Path) -> dict[str, Any]:
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        cfg = compose("config", overrides=[*QUIET, f"results_dir={results_dir}", *overrides])
    values: Any = OmegaConf.to_container(cfg, resolve=True)
    summary, _ = run_experiment(values)
    return summary


def lane_times(summary: dict[str, Any]) -> dict[str, float]:
    """Seconds each lane was busy in the steady window."""
    return {lane: share * summary["window_s"] for lane, share in summary["utilization"].items()}


def speedup(results_dir: Path) -> Iterator[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for name, overrides in SPEEDUP.items():
        summary = run(overrides, results_dir)
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
    """gpu and h2d within a factor of two of each other: steady time over the busiest lane's work."""
    rows: list[dict[str, Any]] = []
    for link_gb_s in (0.55, 0.65):
        summary = run(["experiment=balanced", f"hardware.h2d_gb_s={link_gb_s}"], results_dir)
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
        summary = run(
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
                "preemptions": summary["preemptions"],
                "predicted_tok_s": summary["predicted_throughput_tok_s"],
                "emulated_tok_s": summary["throughput_tok_s"],
                "accuracy": summary["prediction_accuracy"],
                "gpu_lane_without_core": summary["stolen_core_share"],
                "host_steal": summary["host_steal_share"],
            }
        )
        yield rows[-1]


PARTS = {"speedup": speedup, "balanced": balanced, "stage2": stage2}


def markdown(rows: list[dict[str, Any]]) -> str:
    """A table of plain values."""

    def cell(value: Any) -> str:
        return f"{value:.3g}" if isinstance(value, float) else str(value)

    header = list(rows[0])
    lines = ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
    lines += ["| " + " | ".join(cell(row[name]) for name in header) + " |" for row in rows]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=sorted(PARTS), action="append", help="parts to run (default: all)")
    parser.add_argument("--out", type=Path, default=None, help="folder for <part>.json and <part>.md")
    parser.add_argument("--results-dir", type=Path, default=ROOT / "results", help="where run folders go")
    args = parser.parse_args()
    header = {
        "date": date.today().isoformat(),
        "code": code_version(),
        "environment": environment(),
        "command": "python benchmarks/moelens_report.py " + " ".join(sys.argv[1:]),
        "label": "emulated",
    }
    for part in args.only or PARTS:
        rows = []
        for row in PARTS[part](args.results_dir):
            rows.append(row)
            print(row, flush=True)
            if args.out:  # after every run: what is cut off leaves what was finished
                args.out.mkdir(parents=True, exist_ok=True)
                (args.out / f"{part}.json").write_text(json.dumps({**header, "rows": rows}, indent=1) + "\n")
                (args.out / f"{part}.md").write_text(f"# {part} ({header['label']})\n\n{markdown(rows)}\n")
        print(markdown(rows))


if __name__ == "__main__":
    main()
