"""Keep what ran on the simulated machine: every packet in 88 bytes, or only sums by lane and kind of op."""

from __future__ import annotations

from collections.abc import Iterator
from struct import Struct
from typing import Any, NamedTuple

import numpy as np

from harness.machine.base import Lane, Span, Work
from harness.machine.packed_spans import NONE, SpanSequence
from kernels.simulation import span_log

_COLUMNS = (
    ("ticket", "i8"), ("start_s", "f8"), ("end_s", "f8"), ("flops", "f8"), ("device_bytes", "f8"),
    ("host_bytes", "f8"), ("link_bytes", "f8"), ("layer", "i4"), ("micro_batch", "i4"), ("packet", "i4"),
    ("count", "i4"), ("num_packets", "i4"), ("lane", "u2"), ("kind", "u2"), ("urgent", "?"),
)  # fmt: skip
ROW = np.dtype(list(_COLUMNS), align=True)  # as kernels/csrc/simulation/span_log.h has it
_ROW = Struct("=qddddddiiiiiHH?7x")
assert _ROW.size == ROW.itemsize
_ROWS_AT_ONCE = 1 << 14  # of an iteration, which needs no copy of them all


class Totals(NamedTuple):
    """Sums over one kind of op on one lane."""

    num_ops: int = 0  # that have ended
    busy_s: float = 0.0
    flops: float = 0.0
    device_bytes: float = 0.0
    host_bytes: float = 0.0
    link_bytes: float = 0.0


TotalsByKind = dict[tuple[Lane, str], Totals]


class SpanLog(SpanSequence):
    """The log of all spans of a simulation. `native` is where the event loop writes. With `keeps_rows` off there are
    only sums, and as a sequence of spans it is empty, however long the run."""

    def __init__(self, *, keeps_rows: bool) -> None:
        self.native = span_log(keeps_rows=keeps_rows)
        self._lanes: list[Lane] = []
        self._kinds: list[str] = []

    def name(self, lanes: list[Lane], kinds: list[str]) -> None:
        """Name the codes of lanes and kinds of op, in lists that the machine lets grow."""
        self._lanes, self._kinds = lanes, kinds

    def columns(self, first: int = 0) -> tuple[np.ndarray, list[Lane], list[str]]:
        """Return a copy of the rows from number `first` on, of dtype `ROW`, and what its lane and kind codes mean.

        `count` of the op's `num_packets` packets ran in a row; its work columns are those of the whole op.
        """
        return np.frombuffer(self.native.rows(first, len(self)), dtype=ROW), list(self._lanes), list(self._kinds)

    def _span(self, values: tuple[Any, ...]) -> Span:
        ticket, start_s, end_s, *numbers, layer, micro_batch, packet, count, num_packets, lane, kind, urgent = values
        work = Work(*numbers)
        if count < num_packets:
            part = count / num_packets
            work = Work(*(number * part for number in numbers))
        return Span(
            self._lanes[lane], self._kinds[kind], None if layer == NONE else layer,
            None if micro_batch == NONE else micro_batch, ticket, packet, num_packets, urgent, start_s, end_s,
            end_s - start_s, work,
        )  # fmt: skip

    def _spans(self, first: int, last: int) -> Iterator[Span]:
        for start in range(first, last, _ROWS_AT_ONCE):
            rows = self.native.rows(start, min(last, start + _ROWS_AT_ONCE))
            yield from map(self._span, _ROW.iter_unpack(rows))

    def __len__(self) -> int:
        return len(self.native)

    def clear(self) -> None:
        self.native.clear()
