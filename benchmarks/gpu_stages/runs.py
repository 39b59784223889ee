"""Runs through the ordinary entrance, each within a time of its own; a run that is cut off keeps its records."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_stages.plan import MODEL, Scale, tiny_models
from benchmarks.gpu_stages.record import DeviceLost, boxed
from harness.cli.overrides import composed_values, explained
from harness.machine.build import load_machine
from harness.machine.cuda import device_lost
from harness.memory.weights import stored_bytes
from harness.model.gpu_kernels import warm_up
from harness.model.planned import planned_model
from harness.record.files import read_json
from harness.run.experiment import RunFailed, run_experiment
from harness.run.session import Session
from harness.settings import parse_settings

_KEPT = (
    *("status", "error", "label", "throughput_tok_s", "processed_tok_s", "predicted_throughput_tok_s"),
    *("prediction_accuracy", "generated_tokens", "num_passes", "preemptions", "utilization", "h2d_gb_s"),
    *("h2d_busy_gb_s", "h2d_ceiling_gb_s", "bottleneck", "verify", "setup_s", "generation_s", "weights_source"),
    *("steady_decode", "stopped"),
)


_LEAST_BOX_S = 10.0  # less shows nothing
_FIRST_BOX_S = 30.0  # of a process's first run: it imports, and loads what all of them use
_NO_TIME = {"status": "skipped", "error": "no time left"}
_BROKEN_OFF = {"status": "failed", "error": "the process ended while this was under way"}


def run(overrides: Sequence[str], *, box_s: float) -> dict[str, Any]:
    """Run run.py once. Returns what its summary says, the folder, and `error` where it did not end well."""
    folder: Path | None = None
    error = None
    over = threading.Event()
    try:
        values = composed_values(list(overrides))
        with boxed(box_s, over):
            _, folder = run_experiment(values)
    except KeyboardInterrupt as cut:
        if not over.is_set():
            raise  # a user's, or a box around this one
        folder = Path(str(cut)) if str(cut) else folder  # without a text it came before or after the run
        error = f"cut off after {box_s:.0f} s"
    except RunFailed as failed:
        folder, error = failed.folder, str(failed).splitlines()[0]
    except Exception as other:
        error = str(explained(other) or f"{type(other).__name__}: {other}")
    return {**_summary(folder), **({"error": error} if error else {}), "folder": str(folder) if folder else None}


def _summary(folder: Path | None) -> dict[str, Any]:
    path = folder / "summary.json" if folder else None
    if path is None or not path.exists():
        return {"status": "failed"}
    summary = read_json(path)
    return {name: summary[name] for name in _KEPT if name in summary}


def strategy_overrides(name: str, values: dict[str, Any], scale: Scale) -> list[str]:
    """Make packets as large as the link needs, where the strategy cuts its transfers into packets. All strategies take
    the weights from pinned memory: the host could not hold them in pageable memory too, for those that stage them."""
    changes = {"packet_mb": f"{scale.packet_mb:g}", "staging": "false"}
    return [f"strategy={name}", *(f"strategy.{key}={value}" for key, value in changes.items() if key in values)]


def compile_kernels() -> dict[str, float]:
    """Compile the GPU kernels of every model that is run, so that no run waits for a compiler; return seconds by
    model."""
    seconds = {}
    for model in (*tiny_models(), MODEL):
        settings = parse_settings(composed_values([f"model={model}"]))
        begun_s = time.monotonic()
        warm_up(planned_model(settings.model).spec, torch.device("cuda"), settings.kv_block_tokens)
        torch.cuda.synchronize()
        seconds[model] = round(time.monotonic() - begun_s, 1)
    return seconds


Rows = dict[str, dict[str, Any]]  # what runs have found, by their names


def check_tokens(
    scale: Scale, results: Path, left_s: float, keep: Any, done: Rows | None = None, more: Sequence[str] = ()
) -> dict[str, Any]:
    """Run every strategy on every tiny checkpoint and compare all tokens with Hugging Face, as far as the time goes.

    The first checkpoint is run in bfloat16 before: that is what all measured runs compute in, with tensor cores, and
    a replay of Hugging Face's in float32 says whether every token is one that rounding allows. Cases in `done` are not
    run again; `more` are further overrides.
    """
    rows = dict(done or {})
    models = tiny_models()
    kinds = [(models[0], "bfloat16"), *((model, "float32") for model in models)]
    cases = {
        f"{name} {model}{' bfloat16' * (dtype == 'bfloat16')}": (f"strategy={name}", f"model={model}", dtype)
        for model, dtype in kinds
        for name in scale.strategies
    }
    todo = [case for case in cases if case not in rows]
    end_s = time.monotonic() + left_s
    for number, case in enumerate(todo):
        strategy, model, dtype = cases[case]
        box_s = max(_LEAST_BOX_S if number else _FIRST_BOX_S, (end_s - time.monotonic()) / (len(todo) - number))
        if time.monotonic() >= end_s:
            rows[case] = _NO_TIME
            continue
        keep({"runs": {**rows, case: _BROKEN_OFF}})
        found = run(
            [
                strategy, model, f"model.dtype={dtype}", f"machine={scale.machine}", "hardware=laptop", "verify=all",
                f"dataset.num_requests={scale.token_requests}", "dataset.max_new_tokens=8", "kv_cache_gb=0.001",
                "wandb.mode=disabled", "progress=false", f"results_dir={results}", *more,
            ],
            box_s=box_s,
        )  # fmt: skip
        rows[case] = {k: found.get(k) for k in ("status", "error", "verify", "folder")}
        print(f"   {case}: {found['status']} {found.get('error') or ''}", flush=True)
        keep({"runs": rows})
        _require_device()
    return {"runs": rows, "exact": sum(r["status"] == "ok" for r in rows.values()), "of": len(rows)}


def take_memory(scale: Scale) -> dict[str, Any]:
    """Take and pin the host memory of weights and KV cache, for all runs that follow within `keeping`."""
    overrides = [*scale.workload(), "model.path=random", f"machine={scale.machine}"]
    settings = parse_settings(composed_values(overrides))
    with Session(settings, load_machine(settings.machine)) as session:
        sizes = {"weights": stored_bytes(session.load_model().source), "kv cache": int(scale.kv_gb * 1e9)}
        pinned = session.build_machine().tiers["pinned"]
        begun_s = time.monotonic()
        for name, nbytes in sizes.items():
            pinned.reserve(name, nbytes)
    seconds = time.monotonic() - begun_s
    total_gb = sum(sizes.values()) / 1e9
    print(f"   {total_gb:.4g} GB in {seconds:.1f} s", flush=True)
    return {"taken_gb": total_gb, "gb_s": total_gb / seconds}


def measure_strategies(
    scale: Scale, results: Path, rates: Sequence[str], left_s: float, keep: Any, done: Rows | None = None
) -> dict[str, Any]:
    """Run every strategy on the same weights, prompts and memory, one after the other; `done` is as in
    `check_tokens`."""
    rows = dict(done or {})
    todo = [(name, values) for name, values in scale.strategies.items() if name not in rows]
    end_s = time.monotonic() + left_s
    for number, (name, values) in enumerate(todo):
        share_s = share_of_s(end_s - time.monotonic(), len(todo) - number)
        if share_s < _LEAST_BOX_S / 2:
            rows[name] = _NO_TIME
            keep({"runs": rows})
            continue
        keep({"runs": {**rows, name: _BROKEN_OFF}})
        found = run(
            [
                *strategy_overrides(name, values, scale), *scale.workload(), *rates, f"machine={scale.machine}",
                "model.path=random", f"results_dir={results}",
            ],
            box_s=min(scale.box_s, share_s),
        )  # fmt: skip
        rows[name] = found
        rate = (
            (found.get("steady_decode") or {}).get("tok_s") if found.get("stopped") else found.get("throughput_tok_s")
        )
        print(f"   {name}: {found['status']} {'-' if rate is None else f'{rate:.1f} tok/s'} "
              f"{found.get('error') or ''}", flush=True)  # fmt: skip
        keep({"runs": rows})
        _require_device()
    return {"runs": rows}


def share_of_s(left_s: float, num_runs: int) -> float:
    """Return the seconds of the next of so many runs: what the others' least leaves, or as much as each of them."""
    return max(left_s - _LEAST_BOX_S * (num_runs - 1), left_s / num_runs)


def _require_device() -> None:
    lost = device_lost()
    if lost is not None:
        raise DeviceLost(lost)
