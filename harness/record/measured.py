"""Measure a run's spans: all of them when it has ended, or pass by pass, so that those that are over can be forgotten.

Both ways give the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from harness.machine.base import Lane, LaneKind, Span
from harness.record.activity import Activity, LaneActivity, tickets
from harness.record.passes import PassRecord
from harness.record.spans import SpanColumns, SpanTable, Window, lane_order


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Says what a run's lanes did in its steady window. Of the whole run it has the number of spans, and the FLOPs of
    gpu ops with the seconds that these took."""

    steady: Activity
    num_spans: int = 0
    gpu_flops: float = 0.0
    gpu_s: float = 0.0

    @classmethod
    def of(cls, spans: Iterable[Span], window: Window) -> Measured:
        """Measure all spans of a run, whose steady window is known."""
        columns = SpanColumns.of(spans)
        return cls(steady=Activity.of(columns, window)).followed_by(columns)

    def followed_by(self, new: SpanColumns) -> Measured:
        """Count spans of the whole run."""
        codes = [code for code, lane in enumerate(new.lanes) if lane.kind is LaneKind.GPU]
        rows = new.rows[np.isin(new.lane, codes) & (new.rows["flops"] > 0)]
        return replace(
            self,
            num_spans=self.num_spans + len(new),
            gpu_flops=self.gpu_flops + float(rows["flops"].sum()),
            gpu_s=self.gpu_s + float((rows["end_s"] - rows["start_s"]).sum()),
        )


_NOTHING = Activity.of([], (0.0, 0.0))
_IDLE = LaneActivity(busy_s=0.0, ran_s=0.0, cpu_s=0.0, moved_bytes=0.0, kinds={})


@dataclass(eq=False)
class Fold:
    """Folds spans into sums, pass by pass. Passes must start and end in their order, and a packet must have been
    recorded when the pass behind the one in which it began has ended.

    What lies between the end of a pass and the end of the next one is a piece. Before the second pass there is a piece
    from the start of the first one.
    """

    cut_s: float = math.inf  # what ended before it may be forgotten
    _whole: Measured = Measured(steady=_NOTHING)
    _first: Activity = _NOTHING  # the first pass
    _head: Activity = _NOTHING  # before the second pass
    _between: Activity = _NOTHING
    _last: Activity = _NOTHING
    _counted: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))  # tickets of the last piece
    _lanes: set[Lane] = field(default_factory=set)
    _num_passes: int = 0

    def count(self, new: SpanColumns) -> None:
        """Count spans that have just been recorded."""
        self._whole = self._whole.followed_by(new)
        self._lanes |= {new.lanes[code] for code in np.unique(new.lane)}

    def add(self, record: PassRecord, spans: SpanColumns) -> None:
        """Add the next pass and all `spans` that ended since `cut_s`."""
        table = SpanTable.of(spans)
        if self._num_passes == 0:
            self.cut_s = record.start_s
            self._first = Activity.of(table, (record.start_s, record.end_s))
        else:
            window = record.start_s if self._num_passes == 1 else self.cut_s, record.end_s
            ran = tickets(table, window)
            if self._num_passes == 1:
                self._head = Activity.of(table, (self.cut_s, record.start_s), ran)
            self._between += self._last
            self._last = Activity.of(table, window, self._counted)
            self.cut_s, self._counted = record.end_s, ran
        self._num_passes += 1

    def measured(self) -> Measured:
        """Return what was folded, over the same window as `steady_window`."""
        if self._num_passes == 1:
            found = self._first
        else:
            found = self._between if self._num_passes > 3 else self._head + self._between + self._last
        lanes = {lane: found.lanes.get(lane, _IDLE) for lane in sorted(self._lanes, key=lane_order)}
        return replace(self._whole, steady=replace(found, lanes=lanes))
