"""Sum up what lanes did in a window. The sums of windows side by side are those of the whole.

A lane is busy while one of its packets runs; bytes and FLOPs of a packet that lies partly in a window count by the part
of its time that does. A window is half open, [start_s, end_s), on the machine's clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from harness.machine.base import Lane, LaneKind
from harness.record.spans import LaneSpans, Spans, SpanTable, Window, union_s

_MOVES = {
    LaneKind.GPU: "device_bytes",
    LaneKind.CPU: "host_bytes",
    LaneKind.H2D: "link_bytes",
    LaneKind.D2H: "link_bytes",
    LaneKind.PIN: "link_bytes",
}
_NONE: NDArray[np.int64] = np.empty(0, np.int64)
_Sums = TypeVar("_Sums", bound="_Additive")


@dataclass(frozen=True)
class _Additive:
    """Adds field by field: numbers, and mappings of what can be added."""

    def __add__(self: _Sums, other: _Sums) -> _Sums:
        return type(self)(**{f.name: _added(getattr(self, f.name), getattr(other, f.name)) for f in fields(self)})


@dataclass(frozen=True, kw_only=True)
class KindActivity(_Additive):
    """Says what one kind of op did on one lane. `num_ops` of them ran at all; `moved_bytes` are of the lane's own
    tier."""

    busy_s: float
    num_ops: int
    flops: float
    moved_bytes: float


@dataclass(frozen=True, kw_only=True)
class LaneActivity(_Additive):
    """Says what one lane did. Packets side by side count once in `busy_s`, and each in `ran_s`; `cpu_s` is the
    processor time of the lane's own thread."""

    busy_s: float
    ran_s: float
    cpu_s: float
    moved_bytes: float
    kinds: Mapping[str, KindActivity]


@dataclass(frozen=True, kw_only=True)
class Activity(_Additive):
    """Says what all lanes did in a window of `length_s`, in `any_lane_s` of which at least one was busy. `lanes` has
    all those that ran anything in the run."""

    length_s: float
    any_lane_s: float
    lanes: Mapping[Lane, LaneActivity]

    @classmethod
    def of(cls, spans: Spans, window: Window, counted: NDArray[np.int64] = _NONE) -> Activity:
        """Sum up a window; ops with tickets in `counted` do not count once more."""
        table = SpanTable.of(spans)
        inside = {lane: packets.within(window) for lane, packets in table.lanes.items()}
        pieces = [packets.clipped(window) for packets in inside.values()]
        start_s = np.concatenate([start for start, _ in pieces]) if pieces else np.empty(0)
        end_s = np.concatenate([end for _, end in pieces]) if pieces else np.empty(0)
        order = np.argsort(start_s, kind="stable")
        return cls(
            length_s=max(0.0, window[1] - window[0]),
            any_lane_s=union_s(start_s[order], end_s[order]),
            lanes={lane: _of_lane(lane, packets, table.kinds, window, counted) for lane, packets in inside.items()},
        )

    def all_lanes(self) -> list[Lane]:
        """Return every lane of every rank that ran anything, idle ones included."""
        ranks = sorted({lane.rank for lane in self.lanes}) or [0]
        return [Lane(kind, rank) for rank in ranks for kind in LaneKind]

    def busy_s(self, lane: Lane) -> float:
        """Return the seconds in which a lane ran anything; 0 where it never did."""
        return self.lanes[lane].busy_s if lane in self.lanes else 0.0

    def moved_bytes(self, lane: Lane) -> float:
        """Return the bytes of a lane's own tier; 0 where it never ran."""
        return self.lanes[lane].moved_bytes if lane in self.lanes else 0.0


def busy_s(spans: Spans, lane: Lane, window: Window) -> float:
    """Return the time within the window in which the lane ran anything."""
    return union_s(*SpanTable.of(spans).lane(lane).within(window).clipped(window))


def moved_bytes(spans: Spans, lane: Lane, window: Window) -> float:
    """Count the bytes of the lane's own tier: the link for h2d and d2h, device memory for gpu, host memory for cpu. For
    pin, the bytes that were copied."""
    return SpanTable.of(spans).lane(lane).within(window).total(_MOVES[lane.kind], window)


def pass_activity(spans: Spans, window: Window) -> dict[str, dict[str, float]]:
    """Return one pass's `{"busy_s": {lane: seconds}, "moved_bytes": {lane: bytes}}`, over all lanes of all ranks."""
    table = SpanTable.of(spans)
    inside = {lane: table.lane(lane).within(window) for lane in table.all_lanes()}
    return {
        "busy_s": {str(lane): union_s(*packets.clipped(window)) for lane, packets in inside.items()},
        "moved_bytes": {str(lane): packets.total(_MOVES[lane.kind], window) for lane, packets in inside.items()},
    }


def tickets(spans: Spans, window: Window) -> NDArray[np.int64]:
    """Return the tickets of all ops that ran in the window."""
    inside = [packets.within(window) for packets in SpanTable.of(spans).lanes.values()]
    found = [packets.rows["ticket"][packets.share(window) > 0.0] for packets in inside]
    return np.unique(np.concatenate(found)) if found else _NONE


def _of_lane(
    lane: Lane, packets: LaneSpans, kinds: tuple[str, ...], window: Window, counted: NDArray[np.int64]
) -> LaneActivity:
    lengths_s = packets.rows["end_s"] - packets.rows["start_s"]
    by_kind = {
        kinds[code]: _of_kind(lane, packets.of_kind(int(code)), window, counted) for code in np.unique(packets.kind)
    }
    return LaneActivity(
        busy_s=union_s(*packets.clipped(window)),
        ran_s=float(np.dot(lengths_s, packets.share(window))),
        cpu_s=packets.total("cpu_s", window),
        moved_bytes=packets.total(_MOVES[lane.kind], window),
        kinds={kind: found for kind, found in by_kind.items() if found is not None},
    )


def _of_kind(lane: Lane, packets: LaneSpans, window: Window, counted: NDArray[np.int64]) -> KindActivity | None:
    present = packets.share(window) > 0.0
    if not present.any():
        return None
    ran = np.unique(packets.rows["ticket"][present])
    return KindActivity(
        busy_s=union_s(*packets.clipped(window)),
        num_ops=int(np.isin(ran, counted, invert=True).sum()) if len(counted) else len(ran),
        flops=packets.total("flops", window),
        moved_bytes=packets.total(_MOVES[lane.kind], window),
    )


def _added(first: Any, second: Any) -> Any:
    if not isinstance(first, Mapping):
        return first + second
    both = {key: first[key] + second[key] for key in first if key in second}
    return {**first, **second, **both}
