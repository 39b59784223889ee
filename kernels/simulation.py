"""The event loop of the simulated machine, in C++ because a run has millions of ops. Torch-free.

What it does is said where it is used (`simulated.py`, `contention.py`, `span_log.py` and `critical_path.py` of
`harness/machine`); the C++ is in `csrc/simulation`. This module only translates arguments.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kernels._extension import native

LANE_KINDS = ("gpu", "cpu", "h2d", "d2h", "pin")
_MAX_KINDS = 8  # as in sharing.h

NativeSharing = Any  # a Sharing of the extension
NativeSpanLog = Any
NativeLanes = Any  # VirtualLanes of the extension


def shared_memory(host_bytes_s: float, *, proportional: bool) -> NativeSharing:
    return native().SharedMemory(host_bytes_s, proportional)


def measured_together(speeds_by_set: Iterable[Mapping[str, float]]) -> NativeSharing:
    """Build the native sharing from the speeds of the kinds in each set of kinds; every possible set must be there."""
    table = [[1.0] * _MAX_KINDS for _ in range(1 << len(LANE_KINDS))]
    for by_kind in speeds_by_set:
        numbers = {LANE_KINDS.index(kind): speed for kind, speed in by_kind.items()}
        for number, speed in numbers.items():
            table[sum(1 << n for n in numbers)][number] = speed
    return native().MeasuredTogether(table)


def speeds_under(sharing: NativeSharing, running: Sequence[tuple[str, int, float]]) -> list[float]:
    """Return the speeds of lanes (kind, rank, demand in bytes per second) that run together."""
    ranks = sorted({rank for _, rank, _ in running})
    lanes = [(LANE_KINDS.index(kind), ranks.index(rank)) for kind, rank, _ in running]
    found: list[float] = sharing.speeds(lanes, [demand for _, _, demand in running])
    return found


def span_log(*, keeps_rows: bool) -> NativeSpanLog:
    return native().SpanLog(keeps_rows=keeps_rows)


def virtual_lanes(log: NativeSpanLog, **others: Any) -> NativeLanes:
    """Build the native lanes. `others` says what the loop has to know of the classes of ops and tickets, and what ties
    an op to earlier ones."""
    return native().VirtualLanes(lane_kinds=LANE_KINDS, log=log, **others)


def in_lane_order(
    *,
    lane: Sequence[int | None],
    urgent: Sequence[bool],
    packets: Sequence[int],
    packet_s: Sequence[float],
    before: Sequence[Sequence[int]],
) -> tuple[list[int], list[float], list[tuple[int, ...]], list[int]]:
    """Return the runs of a graph's ops: by run its node, its seconds and the runs before it, and by node its last run.
    Raises ValueError where what precedes a node has no smaller number, or other numbers make no sense."""
    numbers = [-1 if number is None else number for number in lane]
    found: tuple[list[int], list[float], list[tuple[int, ...]], list[int]] = native().in_lane_order(
        lane=numbers, urgent=urgent, packets=packets, packet_s=packet_s, before=before
    )
    return found
