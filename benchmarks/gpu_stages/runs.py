"""Runs through the ordinary entrance, each within a time of its own; a run that is cut off keeps its records."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.gpu_stages.plan import Scale, tiny_models
from harness.command_line import composed_values, explained
from harness.experiment import RunFailed, run_experiment
from harness.machine.build import load_machine
from harness.memory.weights import stored_bytes
from harness.preparing import load_model
from harness.record.files import read_json
from harness.settings import parse_settings

_KEPT = (
    *("status", "error", "label", "throughput_tok_s", "processed_tok_s", "predicted_throughput_tok_s"),
    *("prediction_accuracy", "generated_tokens", "num_passes", "preemptions", "utilization", "h2d_gb_s"),
    *("h2d_busy_gb_s", "h2d_ceiling_gb_s", "bottleneck", "verify", "setup_s", "generation_s", "weights_source"),
)


def run(overrides: Sequence[str], *, box_s: float) -> dict[str, Any]:
    """One run of run.py; what its summary says, the folder, and `error` where it did not end well."""
    folder: Path | None = None
    error = None
    try:
        values = composed_values(list(overrides))
        with _boxed(box_s):
            _, folder = run_experiment(values)
    except KeyboardInterrupt as cut:  # by the box; a second one, of a user, comes from outside of this call
        folder, error = Path(str(cut)), f"cut off after {box_s:.0f} s"
    except RunFailed as failed:
        folder, error = failed.folder, str(failed).splitlines()[0]
    except Exception as other:
        error = explained(other) or f"{type(other).__name__}: {other}"
    return {**_summary(folder), **({"error": error} if error else {}), "folder": str(folder) if folder else None}


@contextmanager
def _boxed(seconds: float) -> Iterator[None]:
    """An interrupt as by a user once the time is over."""
    thread = threading.main_thread().ident
    assert threading.current_thread().ident == thread, "an interrupt reaches the main thread only"
    timer = threading.Timer(seconds, lambda: signal.pthread_kill(thread, signal.SIGINT))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _summary(folder: Path | None) -> dict[str, Any]:
    path = folder / "summary.json" if folder else None
    if path is None or not path.exists():
        return {"status": "failed"}
    summary = read_json(path)
    return {name: summary[name] for name in _KEPT if name in summary}


def strategy_overrides(name: str, values: dict[str, Any], scale: Scale) -> list[str]:
    """Packets are as large as the link needs, where the strategy cuts its transfers into packets."""
    return [f"strategy={name}", *([f"strategy.packet_mb={scale.packet_mb:g}"] if "packet_mb" in values else [])]


def check_tokens(scale: Scale, results: Path, left_s: float, keep: Any) -> dict[str, Any]:
    """Every strategy on every tiny checkpoint, all tokens against Hugging Face."""
    rows: dict[str, dict[str, Any]] = {}
    cases = [(model, name) for model in tiny_models() for name in scale.strategies]
    box_s = max(10.0, left_s / max(len(cases), 1))
    for model, name in cases:
        found = run(
            [
                f"strategy={name}", f"model={model}", f"machine={scale.machine}", "hardware=laptop", "verify=all",
                f"dataset.num_requests={scale.token_requests}", "dataset.max_new_tokens=8", "kv_cache_gb=0.001",
                "wandb.mode=disabled", "progress=false", f"results_dir={results}",
            ],
            box_s=box_s,
        )  # fmt: skip
        rows[f"{name} {model}"] = {k: found.get(k) for k in ("status", "error", "verify", "folder")}
        print(f"   {name} {model}: {found['status']} {found.get('error') or ''}", flush=True)
        keep({"runs": rows})
    return {"runs": rows, "exact": sum(r["status"] == "ok" for r in rows.values()), "of": len(rows)}


def take_memory(scale: Scale) -> dict[str, Any]:
    """Take and pin the host memory of weights and KV cache, for all runs that follow within `keeping`."""
    overrides = [*scale.workload(), "model.path=random", f"machine={scale.machine}"]
    settings = parse_settings(composed_values(overrides))
    source = load_model(settings, has_tensors=True).source
    machine = load_machine(settings.machine).build(settings.hardware, source.spec)
    sizes = {"weights": stored_bytes(source), "kv cache": int(scale.kv_gb * 1e9)}
    begun_s = time.monotonic()
    try:
        for name, nbytes in sizes.items():
            machine.tiers["pinned"].reserve(name, nbytes)
    finally:
        machine.close()
    seconds = time.monotonic() - begun_s
    total_gb = sum(sizes.values()) / 1e9
    print(f"   {total_gb:.4g} GB in {seconds:.1f} s", flush=True)
    return {"taken_gb": total_gb, "gb_s": total_gb / seconds}


def measure_strategies(scale: Scale, results: Path, rates: Sequence[str], left_s: float, keep: Any) -> dict[str, Any]:
    """Every strategy on the same weights, prompts and memory, one after the other."""
    rows: dict[str, dict[str, Any]] = {}
    todo = list(scale.strategies.items())
    for number, (name, values) in enumerate(todo):
        share_s = left_s / (len(todo) - number)
        found = run(
            [
                *strategy_overrides(name, values, scale), *scale.workload(), *rates, f"machine={scale.machine}",
                "model.path=random", f"results_dir={results}",
            ],
            box_s=min(scale.box_s, max(share_s, 5.0)),
        )  # fmt: skip
        rows[name] = found
        left_s -= (found.get("setup_s") or 0.0) + (found.get("generation_s") or 0.0)
        rate = found.get("throughput_tok_s")
        print(f"   {name}: {found['status']} {'-' if rate is None else f'{rate:.1f} tok/s'} "
              f"{found.get('error') or ''}", flush=True)  # fmt: skip
        keep({"runs": rows})
    return {"runs": rows}
