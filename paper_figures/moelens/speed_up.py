"""Simulate MoE-Lens Fig. 11: its speed-up over MoE-Lightning on the A40, with MoE-Lightning as built and best.

MoE-Lightning has the host memory that section 7 gives it, model and KV cache and 30 GB or 1.25 times both, and the
better of the two counts. One full batch of each is simulated, with as many requests as it has sequences. MoE-Lens's
throughputs are those of `paper_figures.moelens.simulate`, of the same lengths; its own planner is the one that runs
here, so it is the same as built and best. For some of the cells:

    python -m paper_figures.moelens.speed_up --kv 70 --g 32 64
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Any

from harness.cli.arguments import CommandParser, whole_number
from harness.engine.strategy import Planning
from harness.interrupts import exit_code
from harness.model.cache import make_writable
from harness.record.provenance import code_version
from paper_figures.measuring import first_batch
from paper_figures.moelens.simulate import GENERATION_LENGTHS, KV_CACHES_GB
from paper_figures.moelens.simulated import FOLDER, runs, summarize
from paper_figures.passes import planned
from paper_figures.pool import each
from paper_figures.reports import made_by
from paper_figures.support import markdown_table, read_json, write_json

HOSTS = {"+30 GB": "hardware.ram_plus_gb=30", "x 1.25": "hardware.ram_times=1.25"}  # section 7
PLANNINGS: tuple[Planning, ...] = ("as_built", "best")
PUBLISHED = {70: 3.2, 210: 6.4}  # section 8.1, averages over all models; at most 12.4
_MOST_REQUESTS = 20_000


def overrides(kv_gb: float, g: int, planning: Planning) -> list[str]:
    """Return the overrides as `python -m harness.plan` takes them, but the host and the requests."""
    return [
        *("strategy=moelightning", f"strategy.planning={planning}", "strategy.packet_mb=100", "model=mixtral-8x7b"),
        *("hardware=a40", "hardware.device_memory_gb=16", f"kv_cache_gb={kv_gb:g}"),
        *("dataset=mtbench", "dataset.synthetic=lengths", f"dataset.max_new_tokens={g}"),
    ]


def full_batches(given: Sequence[str]) -> list[dict[str, Any]]:
    """Simulate a full batch of each policy that MoE-Lightning gets for thousands of requests; hosts on which it gets
    the same one share a row."""
    hosts: dict[tuple[int, int], list[str]] = {}
    for host, memory in HOSTS.items():
        policy = planned([*given, memory, f"dataset.num_requests={_MOST_REQUESTS}"]).strategy.plan
        hosts.setdefault((policy["batch_size"], policy["micro_batch_size"]), []).append(host)
    return [_full_batch(given, names, *sizes) for sizes, names in hosts.items()]


def _full_batch(given: Sequence[str], hosts: list[str], batch_size: int, size: int) -> dict[str, Any]:
    sizes = [f"strategy.policy.batch_size={batch_size}", f"strategy.policy.micro_batch_size={size}"]
    arguments = [*given, HOSTS[hosts[0]], *sizes, f"dataset.num_requests={batch_size}"]
    plan = planned(arguments)
    batch = first_batch(plan)
    return {
        "planning": plan.strategy.plan["planning"], "host": " and ".join(hosts),
        "N": batch_size, "mu": size, "tok_s": batch.throughput_tok_s,
        "prefill_s": batch.prefill_s, "step_s": batch.step_s,
        "decode_busy": dict(batch.decode_busy), "code": code_version(),
        "command": f"python -m harness.plan {' '.join(arguments)}",
    }  # fmt: skip


def moelightning(kv_gb: float, g: int, planning: Planning) -> list[dict[str, Any]]:
    """Simulate its full batches on Mixtral-8x7B and MT-Bench."""
    return [{"kv_cache_gb": kv_gb, "g": g, **found} for found in full_batches(overrides(kv_gb, g, planning))]


def _moelightning(cell: tuple[float, int, Planning]) -> list[dict[str, Any]]:
    return moelightning(*cell)


def ratios(rows: Sequence[dict[str, Any]], moelens: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Divide MoE-Lens's throughput by MoE-Lightning's, of the better host; each way of planning has a ratio of its
    own."""
    found = []
    for run in moelens:
        mine = [r for r in rows if (r["kv_cache_gb"], r["g"]) == (run["kv_cache_gb"], run["g"])]
        better = {
            planning: max((r["tok_s"] for r in mine if r["planning"] == planning), default=None)
            for planning in PLANNINGS
        }
        tok_s = run["throughput_tok_s"]
        found.append({
            "kv_cache_gb": run["kv_cache_gb"], "g": run["g"], "moelens_tok_s": tok_s, "tok_s": better,
            "ratio": {planning: rate and tok_s / rate for planning, rate in better.items()},
        })  # fmt: skip
    return found


def means(found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the means over generation lengths, by KV cache and planning, where all lengths are there."""
    made = []
    for kv_gb in dict.fromkeys(r["kv_cache_gb"] for r in found):
        for planning in PLANNINGS:
            values = [r["ratio"][planning] for r in found if r["kv_cache_gb"] == kv_gb]
            if values and None not in values:
                made.append({
                    "kv_cache_gb": kv_gb, "planning": planning, "arithmetic": fmean(values),
                    "geometric": geometric_mean(values), "most": max(values), "published": PUBLISHED.get(kv_gb),
                })  # fmt: skip
    return made


def tables(data: dict[str, Any]) -> str:
    def told(value: float | None) -> str:
        return "-" if value is None else f"{value:.3g}" if value < 100 else f"{value:,.0f}"

    cells = {
        "KV GB": lambda r: f"{r['kv_cache_gb']:g}",
        "g": lambda r: str(r["g"]),
        "MoE-Lens tok/s": lambda r: told(r["moelens_tok_s"]),
        **{f"MoE-Lightning tok/s, {name.replace('_', ' ')}": lambda r, name=name: told(r["tok_s"][name])
           for name in PLANNINGS},
        **{f"speed-up, {name.replace('_', ' ')}": lambda r, name=name: told(r["ratio"][name]) for name in PLANNINGS},
    }  # fmt: skip
    averages = {
        "KV GB": lambda r: f"{r['kv_cache_gb']:g}",
        "MoE-Lightning": lambda r: r["planning"].replace("_", " "),
        "mean": lambda r: told(r["arithmetic"]),
        "geometric": lambda r: told(r["geometric"]),
        "most": lambda r: told(r["most"]),
        "published mean, all models": lambda r: told(r["published"]),
    }
    rows = {
        "KV GB": lambda r: f"{r['kv_cache_gb']:g}",
        "g": lambda r: str(r["g"]),
        "planned": lambda r: r["planning"].replace("_", " "),
        "host": lambda r: r["host"],
        "μ": lambda r: str(r["mu"]),
        "N": lambda r: f"{r['N']:,}",
        "tok/s": lambda r: told(r["tok_s"]),
        "prefill s": lambda r: told(r["prefill_s"]),
        "s a step": lambda r: told(r["step_s"]),
        "GPU busy in decode": lambda r: f"{r['decode_busy']['gpu']:.0%}",
        "link busy in decode": lambda r: f"{r['decode_busy']['h2d']:.0%}",
    }
    return (
        "# MoE-Lens over MoE-Lightning on an A40 (simulated)\n\nMixtral-8x7B, MTBench lengths. MoE-Lens is the same as "
        f"built and best.\n\n{markdown_table(cells, data['ratios'])}\n{markdown_table(averages, data['means'])}\n"
        f"## MoE-Lightning\n\n{markdown_table(rows, data['rows'])}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = CommandParser("paper_figures.moelens.speed_up", __doc__)
    parser.add_argument("--kv", type=float, nargs="+", default=list(KV_CACHES_GB), help="KV cache, 10^9 bytes")
    parser.add_argument(
        "--g", type=whole_number(1), nargs="+", default=list(GENERATION_LENGTHS), help="tokens to generate"
    )
    parser.add_argument("--planning", nargs="+", choices=PLANNINGS, default=list(PLANNINGS), help="of MoE-Lightning")
    parser.add_argument("--out", type=Path, default=FOLDER, metavar="FOLDER", help="cells that are there are kept")
    return parser.run(_simulate, arguments)


def _simulate(args: Namespace) -> int:
    """Simulate the cells that are asked for, one after another, and write after each what there is."""
    make_writable(args.out, "--out")  # before the work
    path = args.out / "speed_up.json"
    rows: list[dict[str, Any]] = read_json(path)["rows"] if path.exists() else []
    moelens = [summarize(run) for run in runs()]
    cells = list(product(args.kv, args.g, args.planning))
    for cell, made in zip(cells, each(_moelightning, cells), strict=True):
        rows = [r for r in rows if (r["kv_cache_gb"], r["g"], r["planning"]) != cell] + made
        rows.sort(key=lambda r: (r["kv_cache_gb"], r["g"], r["planning"], r["host"]))
        found = ratios(rows, moelens)
        head = made_by("python -m paper_figures.moelens.speed_up")
        data = {**head, "label": "simulated", "rows": rows, "ratios": found, "means": means(found)}
        write_json(path, data)
        (args.out / "speed_up.md").write_text(tables(data), encoding="utf-8")
    print(path.with_suffix(".md").read_text(encoding="utf-8"))
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
