"""Convert times of device events to the host's clock."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from harness.machine.device.runtime import DeviceError, DeviceRuntime

PERIOD_S = 5.0  # between two looks at the host's clock: the runtime tells long times in float32 milliseconds
_ATTEMPTS = 16
_GIVE_UP_S = 60.0


@dataclass(frozen=True)
class Mark:
    """An event whose time on the host's clock is known to within `error_s`."""

    event: Any
    host_s: float
    error_s: float


class DeviceClock:
    """The device's clock is set by an event on a stream of its own, between two readings of `time.monotonic`.

    The event is recorded and awaited between the readings: it lies between them, and the narrowest of some attempts is
    kept. Every few seconds a new one takes its place, so that the two clocks cannot drift apart. `drift_s`: by how much
    the device's clock was found off at worst, before it was set again.
    """

    def __init__(self, runtime: DeviceRuntime) -> None:
        self._runtime = runtime
        self._stream = runtime.stream()
        self.drift_s = 0.0
        self.mark = self._set()
        self.error_s = self.mark.error_s  # the largest of any mark

    def seconds(self, mark: Mark, event: Any) -> float:
        """Return when `event` was reached; it was recorded while `mark` was the clock's."""
        return mark.host_s + self._runtime.elapsed_s(mark.event, event)

    def refresh(self) -> None:
        """Set the clock again if it is time. One thread at a time calls this now and then."""
        if time.monotonic() - self.mark.host_s < PERIOD_S:
            return
        new = self._set()
        self.drift_s = max(self.drift_s, abs(self.seconds(self.mark, new.event) - new.host_s))
        self.error_s = max(self.error_s, new.error_s)
        self.mark = new

    def _set(self) -> Mark:
        marks = [self._try() for _ in range(_ATTEMPTS)]
        return min(marks, key=lambda mark: mark.error_s)

    def _try(self) -> Mark:
        event = self._runtime.event()
        before_s = time.monotonic()
        self._runtime.record(event, self._stream)
        while not self._runtime.query(event):  # tens of microseconds: sleeping would cost the accuracy
            if time.monotonic() - before_s > _GIVE_UP_S:
                raise DeviceError(f"the device did not reach an event on an idle stream within {_GIVE_UP_S:g} s")
        after_s = time.monotonic()
        return Mark(event, (before_s + after_s) / 2, (after_s - before_s) / 2)
