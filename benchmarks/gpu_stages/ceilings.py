"""Measure what the GPU, its links and the host's memory can do at best, alone and together."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from benchmarks.gpu_stages.plan import Scale


def measure(scale: Scale) -> dict[str, Any]:
    """Measure rates in GB/s and TFLOP/s; the links are measured only where there is a device."""
    if not scale.dry:
        torch.cuda.set_per_process_memory_fraction(1.0)  # runs before this one limited it
    found: dict[str, Any] = {"host_gb_s": host_copy_gb_s(scale.memory_bytes)}
    device = "cpu" if scale.dry else "cuda"
    found["gemm_bf16_tflop_s"] = gemm_tflop_s(device, scale.gemm_size)
    found["device_gb_s"] = copy_gb_s(device, scale.memory_bytes)
    if not scale.dry:
        found |= links(scale.memory_bytes)
    for name, value in found.items():
        print(f"   {name}: {value}", flush=True)
    return found


def gemm_tflop_s(device: str, size: int) -> float:
    """Multiply square bfloat16 matrices of random numbers: zeros are faster and prove nothing."""
    a, b = (torch.randn(size, size, device=device).to(torch.bfloat16) for _ in range(2))
    return round(2 * size**3 / _seconds(lambda: torch.mm(a, b), device) * 1e-12, 3)


def copy_gb_s(device: str, nbytes: int) -> float:
    """Copy within the device's memory, and count both bytes read and bytes written."""
    src = torch.ones(nbytes, dtype=torch.uint8, device=device)
    dst = torch.empty_like(src)
    return round(2 * nbytes / _seconds(lambda: dst.copy_(src), device) * 1e-9, 2)


def host_copy_gb_s(nbytes: int) -> float:
    """Copy with all cores, and count both bytes read and bytes written."""
    threads = len(os.sched_getaffinity(0))
    parts = [(torch.ones(nbytes // threads, dtype=torch.uint8), torch.zeros(nbytes // threads, dtype=torch.uint8))
             for _ in range(threads)]  # fmt: skip
    with ThreadPoolExecutor(
        threads, initializer=torch.set_num_threads, initargs=(1,)
    ) as pool:  # else each splits its part
        copy = lambda: list(pool.map(lambda part: part[1].copy_(part[0]), parts))  # noqa: E731
        return round(2 * nbytes / _seconds(copy, "cpu") * 1e-9, 2)


def _seconds(run: Callable[[], Any], device: str) -> float:
    """Return the seconds of the best of some repetitions, after a warm-up."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    for _ in range(3):
        run()
    wait()
    best = float("inf")
    for _ in range(8):
        begun_s = time.perf_counter()
        run()
        wait()
        best = min(best, time.perf_counter() - begun_s)
    return best


def links(nbytes: int) -> dict[str, Any]:
    """Measure pinned copies in each direction alone and in both at once."""
    from harness.machine.device.links import link_rates_gb_s
    from harness.machine.device.pinned import HostMemory
    from harness.machine.device.runtime import TorchCudaRuntime

    runtime, host = TorchCudaRuntime(), HostMemory()  # torch's own pinned memory would stay taken
    pinned = {name: host.pinned(nbytes, name, runtime, print) for name in ("h2d", "d2h")}
    try:
        found: dict[str, Any] = {}
        for name, memory in pinned.items():
            found[f"{name}_gb_s"] = round(link_rates_gb_s(runtime, {name: memory})[name], 2)
        both = link_rates_gb_s(runtime, pinned)
        found["together_gb_s"] = {name: round(rate, 2) for name, rate in both.items()}
        return found
    finally:
        for memory in pinned.values():
            host.give_back(memory, runtime)
