"""Measure what the links of a device carry between it and pinned memory, alone and both at once."""

from __future__ import annotations

import time

import torch

from harness.machine.device.runtime import DeviceRuntime

_FEW, _LEAST = 4, 16  # copies that are under way at a time while the link warms up, and that are measured


def link_rates_gb_s(runtime: DeviceRuntime, pinned: dict[str, torch.Tensor]) -> dict[str, float]:
    """Measure the rates of both directions, alone and at the same time. `pinned` has uint8 memory for "h2d" and "d2h",
    some megabytes each. The links have come to their speed before that, and are measured for half as long."""
    streams, pairs, events = {}, {}, {}
    for name, memory in pinned.items():
        streams[name] = runtime.stream()
        target = runtime.allocate(memory.nbytes)
        pairs[name] = (target, memory) if name == "h2d" else (memory, target)
        events[name] = runtime.event(), runtime.event()

    def copy(times: int) -> None:
        """Copy so many times, from all first events to all last ones."""
        for name, (first, _) in events.items():
            runtime.record(first, streams[name])
        for _ in range(times):
            for name, (dst, src) in pairs.items():
                runtime.copy(dst, src, streams[name])
        for name, (_, last) in events.items():
            runtime.record(last, streams[name])
        for _, last in events.values():
            runtime.synchronize(last)

    begun_s, turns = time.monotonic(), 0
    while turns == 0 or time.monotonic() - begun_s < runtime.ramp_s:
        copy(_FEW)
        turns += 1
    measured = max(_LEAST, _FEW * turns // 2)
    copy(measured)
    return {
        name: measured * pinned[name].nbytes / max(runtime.elapsed_s(first, last), 1e-9) * 1e-9
        for name, (first, last) in events.items()
    }
