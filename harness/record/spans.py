"""Spans as columns: one table that every metric reads, fast for a million packets."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from harness.machine.base import Lane, LaneKind, Span, Work
from harness.machine.packed_spans import PackedSpans
from harness.machine.virtual.span_log import SpanLog

Window = tuple[float, float]  # [start_s, end_s) on the machine's clock
Floats = NDArray[np.float64]

_NUMBERS = (
    "start_s",
    "end_s",
    "cpu_s",
    "ticket",
    "work.flops",
    "work.device_bytes",
    "work.host_bytes",
    "work.link_bytes",
)
_ROW = np.dtype([(name.rpartition(".")[2], np.int64 if name == "ticket" else np.float64) for name in _NUMBERS])


@dataclass(frozen=True, eq=False)
class LaneSpans:
    """The packets of one lane, sorted by start: a structured row each, and an index into the table's `kinds`."""

    rows: NDArray[np.void]  # [packets]
    kind: NDArray[np.int64]  # [packets]
    latest_end_s: Floats  # [packets] the running maximum of the ends: what makes a window a slice

    def within(self, window: Window) -> LaneSpans:
        """Return the packets that may overlap the window; a few that only touch it can be among them."""
        first = np.searchsorted(self.latest_end_s, window[0], side="left")
        last = np.searchsorted(self.rows["start_s"], window[1], side="left")
        piece = slice(int(first), max(int(first), int(last)))
        return LaneSpans(self.rows[piece], self.kind[piece], self.latest_end_s[piece])

    def of_kind(self, kind: int) -> LaneSpans:
        rows = self.rows[self.kind == kind]
        return LaneSpans(rows, self.kind[self.kind == kind], np.maximum.accumulate(rows["end_s"]))

    def share(self, window: Window) -> Floats:
        """Return how much of each packet lies in the window, 0 to 1. A packet without duration is in or out by its
        start."""
        start_s, end_s = self.rows["start_s"], self.rows["end_s"]
        duration_s = end_s - start_s
        inside_s = np.minimum(end_s, window[1]) - np.maximum(start_s, window[0])
        instant = (start_s >= window[0]) & (start_s < window[1])
        proportion = np.clip(inside_s, 0.0, None) / np.where(duration_s > 0, duration_s, 1.0)
        return np.where(duration_s > 0, np.minimum(proportion, 1.0), instant.astype(np.float64))

    def clipped(self, window: Window) -> tuple[Floats, Floats]:
        """Cut starts and ends to the window; packets outside have an end that is not after their start."""
        return np.maximum(self.rows["start_s"], window[0]), np.minimum(self.rows["end_s"], window[1])

    def total(self, column: str, window: Window) -> float:
        """Return the sum of a column, pro-rated by the overlap of each packet with the window."""
        return float(np.dot(self.rows[column], self.share(window)))

    def work(self, window: Window) -> Work:
        columns = ("flops", "device_bytes", "host_bytes", "link_bytes")
        return Work(**{column: self.total(column, window) for column in columns})


@dataclass(frozen=True, eq=False)
class SpanColumns:
    """The columns of packets in the order of their recording, with lanes and kinds of op as codes."""

    rows: NDArray[np.void]  # [packets]
    lane: NDArray[np.int64]  # [packets] an index into `lanes`
    kind: NDArray[np.int64]  # [packets] an index into `kinds`
    lanes: list[Lane]
    kinds: list[str]

    @classmethod
    def of(cls, spans: Iterable[Span], first: int = 0) -> SpanColumns:
        """Copy the columns of the spans from number `first` on: a machine may append others meanwhile."""
        if isinstance(spans, SpanLog):
            return cls(*_of_log(spans, first))
        return cls(*(_of_packed(spans, first) if isinstance(spans, PackedSpans) else _of_list(list(spans)[first:])))

    def __len__(self) -> int:
        return len(self.rows)

    def ending_from(self, start_s: float) -> SpanColumns:
        """Return the packets that end at `start_s` or later."""
        later = self.rows["end_s"] >= start_s
        return SpanColumns(self.rows[later], self.lane[later], self.kind[later], self.lanes, self.kinds)

    def followed_by(self, others: SpanColumns) -> SpanColumns:
        lanes = list(dict.fromkeys([*self.lanes, *others.lanes]))
        kinds = list(dict.fromkeys([*self.kinds, *others.kinds]))
        lane = np.array([lanes.index(name) for name in others.lanes], dtype=np.int64)[others.lane]
        kind = np.array([kinds.index(name) for name in others.kinds], dtype=np.int64)[others.kind]
        rows = np.concatenate((self.rows, others.rows))
        lane, kind = np.concatenate((self.lane, lane)), np.concatenate((self.kind, kind))
        return SpanColumns(rows, lane, kind, lanes, kinds)


_Columns = tuple[NDArray[np.void], NDArray[np.int64], NDArray[np.int64], list[Lane], list[str]]


def _of_list(packets: list[Span]) -> _Columns:
    rows = np.fromiter(map(attrgetter(*_NUMBERS), packets), dtype=_ROW, count=len(packets))
    lane_codes: dict[Lane, int] = {}
    kind_codes: dict[str, int] = {}
    lane = np.array([lane_codes.setdefault(s.lane, len(lane_codes)) for s in packets], dtype=np.int64)
    kind = np.array([kind_codes.setdefault(s.kind, len(kind_codes)) for s in packets], dtype=np.int64)
    return rows, lane, kind, list(lane_codes), list(kind_codes)


def _of_log(log: SpanLog, first: int) -> _Columns:
    """Return the columns of a span log, without making an object for each span."""
    logged, lanes, kinds = log.columns(first)
    rows = np.empty(len(logged), dtype=_ROW)
    for name in ("start_s", "end_s", "ticket"):
        rows[name] = logged[name]
    rows["cpu_s"] = logged["end_s"] - logged["start_s"]
    part = logged["count"] / logged["num_packets"]
    for name in ("flops", "device_bytes", "host_bytes", "link_bytes"):
        rows[name] = logged[name] * part
    return rows, logged["lane"].astype(np.int64), logged["kind"].astype(np.int64), lanes, kinds


def _of_packed(spans: PackedSpans, first: int) -> _Columns:
    """Return the columns of spans that are packed already."""
    packed, lanes, kinds = spans.columns(first)
    rows = np.empty(len(packed), dtype=_ROW)
    for name in _ROW.names or ():
        rows[name] = packed[name]
    return rows, packed["lane"].astype(np.int64), packed["kind"].astype(np.int64), lanes, kinds


@dataclass(frozen=True, eq=False)
class SpanTable:
    """The table of all packets of a run, by lane. Build it once where several metrics are asked of the same spans."""

    lanes: dict[Lane, LaneSpans]
    kinds: tuple[str, ...]

    @classmethod
    def of(cls, spans: Spans) -> SpanTable:
        if isinstance(spans, SpanTable):
            return spans
        columns = spans if isinstance(spans, SpanColumns) else SpanColumns.of(spans)
        names, lanes = columns.lanes, {}
        codes: list[int] = np.flatnonzero(np.bincount(columns.lane)).tolist()
        for code in sorted(codes, key=lambda code: lane_order(names[code])):
            here = np.flatnonzero(columns.lane == code)
            start_s, end_s = columns.rows["start_s"][here], columns.rows["end_s"][here]
            if (np.diff(start_s) <= 0).any():  # a lane's packets are often recorded in the order of their starts
                here = here[np.lexsort((end_s, start_s))]
            mine = columns.rows[here]
            lanes[names[code]] = LaneSpans(mine, columns.kind[here], np.maximum.accumulate(mine["end_s"]))
        return cls(lanes, tuple(columns.kinds))

    def lane(self, lane: Lane) -> LaneSpans:
        empty = LaneSpans(np.empty(0, _ROW), np.empty(0, np.int64), np.empty(0))
        return self.lanes.get(lane, empty)

    def all_lanes(self) -> list[Lane]:
        """Return every lane of every rank that ran anything, idle ones included."""
        ranks = sorted({lane.rank for lane in self.lanes}) or [0]
        return [Lane(kind, rank) for rank in ranks for kind in LaneKind]


Spans = Iterable[Span] | SpanColumns | SpanTable


def lane_order(lane: Lane) -> tuple[int, int]:
    """Order lanes rank by rank, as gpu, cpu, h2d, d2h, pin."""
    return lane.rank, list(LaneKind).index(lane.kind)


def union_s(start_s: Floats, end_s: Floats) -> float:
    """Return the total length covered by intervals; `start_s` ascending, an end before its start counts as nothing."""
    if not len(start_s):
        return 0.0
    covered_to_s = np.concatenate(([-np.inf], np.maximum.accumulate(end_s)[:-1]))
    return float(np.clip(end_s - np.maximum(start_s, covered_to_s), 0.0, None).sum())
