"""Lane activity of each pass while the run goes on, for records that a kill must not lose."""

from __future__ import annotations

from collections.abc import MutableSequence
from dataclasses import asdict
from typing import Any

from harness.machine.base import Span
from harness.record.metrics import pass_activity
from harness.record.passes import PassRecord
from harness.record.spans import SpanColumns


class PassMeter:
    """Turns passes into rows with the busy time and bytes of every lane, reading each span once.

    A row is handed out when the next pass has been added: a packet that crosses a pass's end is recorded only when it
    ends, so that the row of a pass that has just ended would miss it. Passes must come in the order of their starts.
    """

    def __init__(self, spans: MutableSequence[Span], *, clears: bool = False) -> None:
        """Take the machine's own list `spans`, which grows while the run goes on, or is cleared whenever it is read."""
        self._spans = spans
        self._clears = clears
        self._num_read = 0
        self._recent = SpanColumns.of([])  # those that a pass still to be measured may overlap
        self._held: PassRecord | None = None

    def add(self, record: PassRecord) -> list[dict[str, Any]]:
        """Add a pass and return the rows that are complete now: the pass before this one, if any."""
        assert self._held is None or record.start_s >= self._held.start_s, (
            "passes must come in the order of their starts"
        )
        rows = self.finish()
        self._held = record
        self._recent = self._recent.ending_from(record.start_s)
        return rows

    def finish(self) -> list[dict[str, Any]]:
        """Return the row of the pass still held, if any. It is called once more after the last pass, when all lanes are
        idle."""
        if self._held is None:
            return []
        new = SpanColumns.of(self._spans, self._num_read)
        self._num_read += len(new)
        if self._clears:
            self._spans.clear()
            self._num_read = 0
        self._recent = self._recent.followed_by(new)
        held, self._held = self._held, None
        return [{**asdict(held), **pass_activity(self._recent, (held.start_s, held.end_s))}]
