"""Everything that is derived from spans and passes, once, for all machines.

A lane is busy while one of its packets runs; bytes and FLOPs of a packet that lies partly in a window count by the part
of its time that does. A window is half open, [start_s, end_s), on the machine's clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from harness.machine.base import HOST_KINDS, EstimatedShares, Lane, LaneKind
from harness.record.passes import PassRecord
from harness.record.spans import Spans, SpanTable, Window, lane_order, union_s

SATURATED = (
    0.85  # busy share from which a lane is called saturated; a full lane never shows 100 %: hand-overs cost time
)
BELOW_CEILING = 0.80  # share of a link's ceiling below which its rate while busy is worth a word
WORTH_NAMING = 0.10  # share of a busy lane's time from which an op's kind is named

_MOVES = {
    LaneKind.GPU: "device_bytes",
    LaneKind.CPU: "host_bytes",
    LaneKind.H2D: "link_bytes",
    LaneKind.D2H: "link_bytes",
    LaneKind.PIN: "link_bytes",
}
_IN_WORDS = {
    LaneKind.GPU: "GPU compute",
    LaneKind.CPU: "CPU compute",
    LaneKind.H2D: "transfer to the device",
    LaneKind.D2H: "transfer to the host",
    LaneKind.PIN: "staging into pinned memory",
}


@dataclass(frozen=True, kw_only=True)
class LinkRate:
    """The rate that a lane moved: over the whole window, and over the time it was busy."""

    window_gb_s: float
    busy_gb_s: float


@dataclass(frozen=True, kw_only=True)
class KindTotal:
    """The cost of one kind of op on one kind of lane, summed over ranks. `share` is busy time per lane and window."""

    lane: LaneKind
    kind: str
    busy_s: float
    share: float
    num_ops: int
    flops: float
    moved_bytes: float


def steady_window(passes: Sequence[PassRecord]) -> Window:
    """Return the window from the start of the second pass to the end of the last but one: filling and draining are left
    out. With fewer than four passes the window covers all of them; without any it is empty."""
    if not passes:
        return 0.0, 0.0
    if len(passes) < 4:
        return min(p.start_s for p in passes), max(p.end_s for p in passes)
    ordered = sorted(passes, key=lambda p: p.index)
    return ordered[1].start_s, ordered[-2].end_s


def busy_s(spans: Spans, lane: Lane, window: Window) -> float:
    """Return the time within the window in which the lane ran anything."""
    return union_s(*SpanTable.of(spans).lane(lane).within(window).clipped(window))


def cpu_s(spans: Spans, lane: Lane, window: Window) -> float:
    """Return the processor time of the lane's own thread within the window."""
    return SpanTable.of(spans).lane(lane).within(window).total("cpu_s", window)


def moved_bytes(spans: Spans, lane: Lane, window: Window) -> float:
    """Count the bytes of the lane's own tier: the link for h2d and d2h, device memory for gpu, host memory for cpu. For
    pin, the bytes that were copied."""
    return SpanTable.of(spans).lane(lane).within(window).total(_MOVES[lane.kind], window)


def link_rate(spans: Spans, lane: Lane, window: Window) -> LinkRate:
    """Return the achieved decimal GB/s of a lane; 0 where it never ran."""
    table = SpanTable.of(spans)
    gigabytes, length_s, worked_s = (
        moved_bytes(table, lane, window) / 1e9,
        _length_s(window),
        busy_s(table, lane, window),
    )
    return LinkRate(window_gb_s=_ratio(gigabytes, length_s), busy_gb_s=_ratio(gigabytes, worked_s))


def utilization(spans: Spans, window: Window) -> dict[str, float]:
    """Return the busy share of the window by kind of lane, 0 to 1, the mean over lanes; all 0 over an empty window."""
    table = SpanTable.of(spans)
    shares: dict[str, list[float]] = {kind.value: [] for kind in LaneKind}
    for lane in table.all_lanes():
        shares[lane.kind.value].append(_ratio(busy_s(table, lane, window), _length_s(window)))
    return {kind: sum(values) / _num_lanes(table, LaneKind(kind)) for kind, values in shares.items()}


def _num_lanes(table: SpanTable, kind: LaneKind) -> int:
    """Count the lanes of a kind: one a rank, but of the host's only those that ran anything."""
    if kind in HOST_KINDS:
        return len([lane for lane in table.lanes if lane.kind is kind]) or 1
    return len({lane.rank for lane in table.lanes}) or 1


def overlap_ratio(spans: Spans, window: Window) -> float:
    """Return the sum of all lanes' busy times over the window's length: 1 means that nothing overlaps."""
    table = SpanTable.of(spans)
    return _ratio(sum(busy_s(table, lane, window) for lane in table.lanes), _length_s(window))


def idle_share(spans: Spans, window: Window) -> float:
    """Return the share of the window in which no lane at all runs."""
    pieces = [lane.within(window).clipped(window) for lane in SpanTable.of(spans).lanes.values()]
    start_s = np.concatenate([start for start, _ in pieces]) if pieces else np.empty(0)
    end_s = np.concatenate([end for _, end in pieces]) if pieces else np.empty(0)
    order = np.argsort(start_s, kind="stable")
    return max(0.0, 1.0 - _ratio(union_s(start_s[order], end_s[order]), _length_s(window)))


def stolen_core_share(spans: Spans, window: Window) -> float | None:
    """Return the share of the gpu lanes' running time in which their thread had no core: another process or lane took
    it. It is only meaningful where the gpu lane is a host thread; None where no processor time was recorded."""
    lanes = [lane.within(window) for name, lane in SpanTable.of(spans).lanes.items() if name.kind is LaneKind.GPU]
    ran_s = sum(float(np.dot(lane.rows["end_s"] - lane.rows["start_s"], lane.share(window))) for lane in lanes)
    on_core_s = sum(lane.total("cpu_s", window) for lane in lanes)
    if on_core_s <= 0.0 or ran_s <= 0.0:
        return None
    return min(1.0, max(0.0, 1.0 - on_core_s / ran_s))


def kind_totals(spans: Spans, window: Window) -> list[KindTotal]:
    """Tell where the time goes: every kind of op on every kind of lane, the largest busy time first."""
    table = SpanTable.of(spans)
    sums: dict[tuple[LaneKind, str], tuple[float, int, float, float]] = {}
    for name, lane in table.lanes.items():
        inside = lane.within(window)
        for code in np.unique(inside.kind):
            part = inside.of_kind(int(code))
            present = part.share(window) > 0.0
            if not present.any():
                continue
            mine = (
                union_s(*part.clipped(window)),
                len(np.unique(part.rows["ticket"][present])),
                part.total("flops", window),
                part.total(_MOVES[name.kind], window),
            )
            key = (name.kind, table.kinds[code])
            so_far = sums.get(key, (0.0, 0, 0.0, 0.0))
            sums[key] = (so_far[0] + mine[0], so_far[1] + mine[1], so_far[2] + mine[2], so_far[3] + mine[3])
    totals = [
        KindTotal(
            lane=lane_kind,
            kind=kind,
            busy_s=busy,
            share=_ratio(busy, _num_lanes(table, lane_kind) * _length_s(window)),
            num_ops=num_ops,
            flops=flops,
            moved_bytes=moved,
        )
        for (lane_kind, kind), (busy, num_ops, flops, moved) in sums.items()
    ]
    return sorted(totals, key=lambda total: (-total.busy_s, lane_order(Lane(total.lane)), total.kind))


def estimated(totals: Sequence[KindTotal], shares: EstimatedShares) -> dict[str, Any]:
    """Return the `share` of all lanes' busy time whose costs are estimates, and its parts by lane and kind of op, the
    largest first."""
    all_s = sum(total.busy_s for total in totals)
    found = {f"{t.lane} {t.kind}": _ratio(shares.get((t.lane, t.kind), 0.0) * t.busy_s, all_s) for t in totals}
    by_kind = {name: share for name, share in found.items() if share > 0}
    return {"share": sum(by_kind.values()), "by_kind": dict(sorted(by_kind.items(), key=lambda kind: -kind[1]))}


def pass_activity(spans: Spans, window: Window) -> dict[str, dict[str, float]]:
    """Return one pass's `{"busy_s": {lane: seconds}, "moved_bytes": {lane: bytes}}`, over all lanes of all ranks."""
    table = SpanTable.of(spans)
    return {
        "busy_s": {str(lane): busy_s(table, lane, window) for lane in table.all_lanes()},
        "moved_bytes": {str(lane): moved_bytes(table, lane, window) for lane in table.all_lanes()},
    }


def bottleneck(spans: Spans, window: Window, ceilings_gb_s: Mapping[str, float] | None = None) -> str:
    """Say in words what holds this run back, from the numbers alone. `ceilings_gb_s` is by kind of lane, where
    known."""
    table, ceilings = SpanTable.of(spans), ceilings_gb_s or {}
    shares = {lane: _ratio(busy_s(table, lane, window), _length_s(window)) for lane in table.lanes}
    ranked = sorted(shares, key=lambda lane: (-shares[lane], lane_order(lane)))
    if not ranked or shares[ranked[0]] == 0.0:
        return "nothing ran in the steady window"
    full = [lane for lane in ranked if shares[lane] >= SATURATED]
    if not full:
        waits = ", ".join(f"{lane} {shares[lane]:.0%}" for lane in ranked[1:] if shares[lane] > 0)
        return (
            f"no lane is saturated: busiest is {_describe(table, ranked[0], shares[ranked[0]], window, ceilings)}"
            f"{f', then {waits}' if waits else ''}; nothing at all runs {idle_share(table, window):.0%} of the time"
        )
    others = "".join(f"; {lane} lane also {shares[lane]:.0%} busy" for lane in full[1:])
    return _describe(table, full[0], shares[full[0]], window, ceilings) + others


def _describe(table: SpanTable, lane: Lane, share: float, window: Window, ceilings: Mapping[str, float]) -> str:
    facts = [f"{lane} lane {share:.0%} busy"]
    rate, ceiling = link_rate(table, lane, window), ceilings.get(lane.kind.value)
    if ceiling:
        facts.append(f"{rate.window_gb_s:.2f} of {ceiling:.2f} GB/s")
        if rate.busy_gb_s < BELOW_CEILING * ceiling:
            facts.append(f"only {rate.busy_gb_s:.2f} GB/s while busy")
    elif lane.kind in (LaneKind.H2D, LaneKind.D2H, LaneKind.PIN):
        facts.append(f"{rate.window_gb_s:.2f} GB/s")
    top = kind_totals(SpanTable({lane: table.lanes[lane]}, table.kinds), window)[:2]
    told = [f"{total.kind} {total.share:.0%}" for total in top if total.share >= WORTH_NAMING * share]
    facts.append(f"most of it {' and '.join(told)}")
    return f"{_IN_WORDS[lane.kind]} ({', '.join(facts)})"


def _length_s(window: Window) -> float:
    return max(0.0, window[1] - window[0])


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0.0 else 0.0
