"""Measure what the links of a device carry between it and pinned memory, alone and both at once."""

from __future__ import annotations

from typing import Any

import torch

from harness.machine.device.runtime import DeviceRuntime

_WARM_UP, _REPEATS = 2, 16


def link_rates_gb_s(runtime: DeviceRuntime, pinned: dict[str, torch.Tensor]) -> dict[str, float]:
    """Measure the rates of both directions, alone and at the same time. `pinned` has uint8 memory for "h2d" and "d2h",
    some megabytes each."""
    streams, timed = {}, {}
    for name, memory in pinned.items():
        streams[name] = runtime.stream()
        target = runtime.allocate(memory.nbytes)
        pair = (target, memory) if name == "h2d" else (memory, target)
        timed[name] = (pair, runtime.event(), runtime.event())
    for turn in range(_WARM_UP + _REPEATS):
        for name, ((dst, src), first, _) in timed.items():
            if turn == _WARM_UP:
                runtime.record(first, streams[name])
            runtime.copy(dst, src, streams[name])
    for name, (_, _, last) in timed.items():
        runtime.record(last, streams[name])
    return {name: _rate_gb_s(runtime, pinned[name], first, last) for name, (_, first, last) in timed.items()}


def _rate_gb_s(runtime: DeviceRuntime, memory: torch.Tensor, first: Any, last: Any) -> float:
    runtime.synchronize(last)
    return _REPEATS * memory.nbytes / max(runtime.elapsed_s(first, last), 1e-9) * 1e-9
