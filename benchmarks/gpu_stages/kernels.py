"""Check every GPU kernel against float32 and time it beside a rival; what is wrong is left out of later runs."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.gpu_stages.kernel_cases import MIXTRAL_8X7B, Case, Sizes, cases
from kernels import triton as gpu

_LEAST_S = 0.02  # of a measurement
_BROKEN_OFF = {"status": "failed", "error": "the process ended while this was under way"}


def measure(
    keep: Callable[[dict[str, Any]], None],
    done: dict[str, dict[str, Any]] | None = None,
    *,
    device: str = "cuda",
    sizes: Sizes = MIXTRAL_8X7B,
    seconds: Callable[[Callable[[], Any]], float] | None = None,
) -> dict[str, Any]:
    """Check and time all cases in bfloat16, by name; `done` are not tried again. `seconds` times a function."""
    rows = dict(done or {})
    for case in cases(sizes, torch.device(device)):
        if case.name in rows:
            continue
        keep({"runs": {**rows, case.name: {"kernel": case.kernel, **_BROKEN_OFF}}})
        rows[case.name] = {"kernel": case.kernel, **_row(case, seconds or seconds_on_gpu)}
        print(f"   {case.name}: {rows[case.name]}", flush=True)
        keep({"runs": rows})
        gc.collect()  # the weights of the largest case take 3 GB
    return {"runs": rows, "left_out": wrong_kernels(rows)}


def _row(case: Case, seconds: Callable[[Callable[[], Any]], float]) -> dict[str, Any]:
    try:
        error = case.error()
    except Exception as failed:  # another kernel may do well; one that broke the device ends the process at the next
        return {"status": "failed", "error": f"{type(failed).__name__}: {str(failed).partition(chr(10))[0]}"}
    found: dict[str, Any] = {"largest_error": error, "status": "ok"}
    if not error <= case.tolerance:
        found |= {"status": "wrong", "error": f"differs by {error:.2g} of the largest number"}
    took_s, rival_s = seconds(case.run), seconds(case.rival)
    found |= {"us": round(took_s * 1e6, 1), "rival": case.rival_name, "rival_us": round(rival_s * 1e6, 1)}
    found |= {"tflop_s": round(case.flops / took_s * 1e-12, 1), "gb_s": round(case.nbytes / took_s * 1e-9, 1)}
    return found


def wrong_kernels(rows: dict[str, dict[str, Any]]) -> list[str]:
    """Return the kernels of which any case is wrong, or ended with an error."""
    return [
        kernel for kernel in gpu.KERNELS if any(r["kernel"] == kernel and r["status"] != "ok" for r in rows.values())
    ]


def overrides(rows: dict[str, dict[str, Any]], unwanted: Sequence[str] = ()) -> list[str]:
    """Return the overrides by which runs on a GPU leave wrong kernels, and unwanted ones, to torch; none where all are
    right."""
    wrong = [kernel for kernel in gpu.KERNELS if kernel in {*wrong_kernels(rows), *unwanted}]
    return [f"machine.triton=[{','.join(k for k in gpu.KERNELS if k not in wrong)}]"] if wrong else []


def seconds_on_gpu(run: Callable[[], Any]) -> float:
    """Return the seconds of a call between two events of the device, of enough calls in a row."""
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(3):
        run()
    calls = 4
    while True:
        first.record()
        for _ in range(calls):
            run()
        last.record()
        last.synchronize()
        took_s = first.elapsed_time(last) * 1e-3
        if took_s >= _LEAST_S:
            return took_s / calls
        calls *= 4
