"""Let lanes wake the strategy's thread, which Ctrl-C may interrupt at any moment."""

from __future__ import annotations

import threading


class Signal:
    """One thread waits until any other sets it; waiting takes it back.

    Python raises KeyboardInterrupt between two steps of whatever the main thread runs. `threading.Condition.wait` is
    Python itself: interrupted just after it has let go of its lock, it leaves the lock free to a `with` block that
    releases it once more, and RuntimeError takes the interrupt's place. Here each step is one call of a lock.
    """

    def __init__(self) -> None:
        self._unset = threading.Lock()
        self._unset.acquire()

    def set(self) -> None:
        """Set the signal, one thread at a time, after the change that is told: whoever has waited then sees it."""
        if self._unset.locked():
            self._unset.release()

    def wait(self, timeout_s: float) -> bool:
        """Wait, and tell whether the signal was set in time."""
        return self._unset.acquire(timeout=timeout_s)
