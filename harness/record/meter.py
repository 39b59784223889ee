"""Lane activity of each pass while the run goes on, for records that a kill must not lose."""

from __future__ import annotations

from collections.abc import MutableSequence
from dataclasses import asdict
from typing import Any

from harness.machine.base import Span
from harness.record.activity import pass_activity
from harness.record.measured import Fold
from harness.record.passes import PassRecord
from harness.record.spans import SpanColumns


class PassMeter:
    """Turns passes into rows with the busy time and bytes of every lane, reading each span once.

    A row is handed out when the next pass has been added: a packet that crosses a pass's end is recorded only when it
    ends, so that the row of a pass that has just ended would miss it. Passes must come in the order of their starts.
    """

    def __init__(self, spans: MutableSequence[Span], *, clears: bool = False, fold: Fold | None = None) -> None:
        """Take the machine's own list `spans`, which grows while the run goes on, or is cleared whenever it is read. To
        `fold` all of them are given, too."""
        self._spans = spans
        self._clears, self._fold = clears, fold
        self._num_read = self._num_cleared = 0
        self._recent = SpanColumns.of([])  # those that a pass still to be measured may overlap
        self._held: PassRecord | None = None

    @property
    def num_spans(self) -> int:
        """The number of spans that were recorded until now, cleared ones included."""
        return self._num_cleared + len(self._spans)

    def add(self, record: PassRecord) -> list[dict[str, Any]]:
        """Add a pass and return the rows that are complete now: the pass before this one, if any."""
        assert self._held is None or record.start_s >= self._held.start_s, (
            "passes must come in the order of their starts"
        )
        rows = self.finish()
        self._held = record
        cut_s = self._fold.cut_s if self._fold else record.start_s
        self._recent = self._recent.ending_from(min(record.start_s, cut_s))
        return rows

    def finish(self) -> list[dict[str, Any]]:
        """Return the row of the pass still held, if any. It is called once more after the last pass, when all lanes are
        idle."""
        if self._held is None:
            return []
        new = SpanColumns.of(self._spans, self._num_read)
        self._num_read += len(new)
        if self._clears:
            self._num_cleared += self._num_read
            self._spans.clear()
            self._num_read = 0
        self._recent = self._recent.followed_by(new)
        held, self._held = self._held, None
        if self._fold:
            self._fold.count(new)
            self._fold.add(held, self._recent)
        recent = self._recent.ending_from(held.start_s)
        return [{**asdict(held), **pass_activity(recent, (held.start_s, held.end_s))}]
