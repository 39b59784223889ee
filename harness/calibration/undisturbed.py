"""Repeat measurements until nobody takes cores away during one, as far as the machine grants that."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from harness.calibration.table import Points
from harness.hardware.steal import read_cpu_times

T = TypeVar("T")
MAX_TAKEN_SHARE = 0.03  # of all cores, during one measurement
MAX_ATTEMPTS = 6
PATIENCE_S = 90.0  # that all repetitions together may take


class Undisturbed:
    """Repeats a measurement during which other processes or the hypervisor's other guests had the cores. After
    `MAX_ATTEMPTS`, or where patience is at its end, it keeps the least disturbed one and says so: `disturbed` has its
    name."""

    def __init__(self, log: Callable[[str], None] = lambda text: None) -> None:
        self._log = log
        self._patience_s = PATIENCE_S
        self.num_rejected = 0
        self.disturbed: list[str] = []
        self._last_was_disturbed = False
        self._apart: list[tuple[dict[str, Points], dict[str, Points]]] = []  # what stayed disturbed, behind its table

    def __call__(self, name: str, measure: Callable[[], T]) -> T:
        result, taken = _watched(measure)
        for attempt in range(1, MAX_ATTEMPTS):
            if taken <= MAX_TAKEN_SHARE or self._patience_s <= 0:
                break
            started_s = time.monotonic()
            self.num_rejected += 1
            time.sleep(0.2 * attempt)
            again, taken_again = _watched(measure)
            if taken_again < taken:
                result, taken = again, taken_again
            self._patience_s -= time.monotonic() - started_s
        self._last_was_disturbed = taken > MAX_TAKEN_SHARE
        if self._last_was_disturbed:
            self.disturbed.append(name)
            self._log(f"DISTURBED: others had {taken:.0%} of the cores during: {name}")
        return result

    def place_in(self, table: dict[str, Points]) -> dict[str, Points]:
        """Return where points of the last measurement go: into the table, or apart if it stayed disturbed."""
        if not self._last_was_disturbed:
            return table
        for known, apart in self._apart:
            if known is table:
                return apart
        self._apart.append((table, {}))
        return self._apart[-1][1]

    def fill_gaps(self) -> None:
        """Let disturbed points count in their tables where there is no other of the same features."""
        for table, apart in self._apart:
            for key, points in apart.items():
                clean = table.setdefault(key, [])
                known = {features for features, _ in clean}
                clean.extend(point for point in points if point[0] not in known)
        self._apart.clear()


def _watched(measure: Callable[[], T]) -> tuple[T, float]:
    """Run a measurement; return its result and the share of all cores that others had meanwhile."""
    before = read_cpu_times()
    result = measure()
    after = read_cpu_times()
    return result, after.taken_share_since(before) if before is not None and after is not None else 0.0
