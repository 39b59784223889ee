"""Run MoE-Lens on a simulated A40 over the MTBench settings of its Fig. 11 and 13, one JSON file a setting.

    python -m paper_figures.moelens.simulate                          # all eight
    python -m paper_figures.moelens.simulate --kv 70 --g 32 64        # some of them
    python -m paper_figures.moelens.simulate --kv 210 --scale 0.2     # a fifth of the paper's requests, and says so

Configuration, and thus every constant, is that of conf/; nothing here is fitted to what the paper reports.
"""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from harness.cli.arguments import CommandParser, whole_number
from harness.config import require
from harness.hardware.profile import MOST_GB
from harness.interrupts import exit_code
from harness.model.cache import make_writable
from harness.plan.planning import Plan
from harness.record.provenance import code_version, environment
from paper_figures.passes import columns, planned, simulated_passes
from paper_figures.pool import each
from paper_figures.support import REFERENCE, write_json
from strategies.moelens.equations import prefills_per_pass

OUT = REFERENCE / "moelens-simulated"
MEAN_PROMPT = 98  # MoE-Lens Table 3
GENERATION_LENGTHS = (32, 64, 128, 256)  # MoE-Lens Table 3
KV_CACHES_GB = (70, 210)  # MoE-Lens section 7
BLOCK_TOKENS = 16  # kv_block_tokens of conf/config.yaml


def paper_requests(kv_gb: float, g: int, kv_bytes_per_token: int) -> int:
    """Return K as MoE-Lens section 7 chooses it: 25,000 or 20,000 with 70 GB, five times what g passes admit with 210
    GB."""
    if kv_gb == 70:
        return 25_000 if g == 32 else 20_000
    blocks = int(kv_gb * 1e9) // (BLOCK_TOKENS * kv_bytes_per_token)
    return round(5 * g * prefills_per_pass(MEAN_PROMPT, g, num_blocks=blocks, block_size=BLOCK_TOKENS))


def overrides(kv_gb: float, g: int, num_requests: int) -> list[str]:
    """Return what `python -m harness.plan` or `python run.py` would be given for the same run."""
    return [
        *("machine=simulated", "strategy=moelens", "model=mixtral-8x7b", "dataset=mtbench", "hardware=a40"),
        *("hardware.device_memory_gb=16", "strategy.packet_mb=100", f"kv_cache_gb={kv_gb:g}"),
        *(f"dataset.max_new_tokens={g}", f"dataset.num_requests={num_requests}"),
    ]


def simulate(kv_gb: float, g: int, scale: float) -> dict[str, Any]:
    """Return one setting's plan, its passes as columns, and what it took."""
    began_s = time.monotonic()
    probe = planned(overrides(kv_gb, g, 1))
    wanted = paper_requests(kv_gb, g, probe.engine.spec.kv_bytes_per_token)
    num_requests = max(1, round(wanted * scale))
    arguments = overrides(kv_gb, g, num_requests)
    plan = planned(arguments)
    rows = simulated_passes(plan)
    prediction = plan.strategy.prediction
    assert prediction is not None
    command = f"python -m harness.plan {' '.join(arguments[1:])}"
    return {
        "label": plan.machine.label,
        "setting": {"kv_cache_gb": kv_gb, "g": g, "num_requests": num_requests, "paper_num_requests": wanted},
        "command": command,
        "whole": whole_run(plan, rows, command),
        "prompts": plan.data_source,
        "code": code_version(),
        "environment": environment(),
        "gpu_tok_s": plan.strategy.gpu_tok_s,
        "gpu_peak_tok_s": plan.settings.hardware.gemm_flop_s(plan.engine.spec.dtype, peak=True)
        / plan.engine.spec.flops_per_token,
        "plan": {key: value for key, value in plan.strategy.plan.items() if not isinstance(value, dict)},
        "prediction": asdict(prediction),
        "passes": columns(rows),
        "host_seconds": round(time.monotonic() - began_s, 1),
    }


def whole_run(plan: Plan, rows: Sequence[Mapping[str, Any]], command: str) -> dict[str, Any]:
    """Sum up all passes of a run: rates in generated tokens and requests a second, and busy shares."""
    length_s, requests = rows[-1]["end_s"] - rows[0]["start_s"], len(plan.engine.sequences)
    prediction = plan.strategy.prediction
    assert prediction is not None
    return {
        "tok_s": sum(r["generated_tokens"] for r in rows) / length_s, "requests": requests, "passes": len(rows),
        "requests_s": requests / length_s, "predicted_tok_s": prediction.throughput_tok_s,
        "busy": {lane: sum(r["busy_s"].get(lane, 0.0) for r in rows) / length_s for lane in ("gpu", "cpu", "h2d")},
        "command": command,
    }  # fmt: skip


def _simulated(setting: tuple[float, int], scale: float) -> dict[str, Any]:
    return simulate(*setting, scale)


def name_of(kv_gb: float, g: int) -> str:
    return f"kv{kv_gb:g}-g{g}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = CommandParser("paper_figures.moelens.simulate", __doc__)
    parser.add_argument("--kv", type=float, nargs="+", default=list(KV_CACHES_GB), help="KV cache, 10^9 bytes")
    parser.add_argument(
        "--g", type=whole_number(1), nargs="+", default=list(GENERATION_LENGTHS), help="tokens to generate"
    )
    parser.add_argument("--scale", type=float, default=1.0, help="share of the paper's number of requests")
    parser.add_argument("--out", type=Path, default=OUT, metavar="FOLDER")
    return parser.run(_simulate_all, arguments)


def _simulate_all(args: Namespace) -> int:
    require(0 < args.scale <= 1, "--scale", f"must be above 0 and at most 1, got {args.scale:g}")
    require(all(0 < kv_gb <= MOST_GB for kv_gb in args.kv), "--kv", f"must be above 0 and at most {MOST_GB:g}")
    make_writable(args.out, "--out")  # before the work
    settings = sorted(product(args.kv, args.g), reverse=True)  # the longest first, so that no core waits for the last
    for (kv_gb, g), data in zip(settings, each(partial(_simulated, scale=args.scale), settings), strict=True):
        write_json(args.out / f"{name_of(kv_gb, g)}.json", data)
        print(name_of(kv_gb, g), data["setting"], len(data["passes"]["end_s"]), "passes,", data["host_seconds"], "s")
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
