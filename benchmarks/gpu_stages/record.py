"""Stages one after the other within a budget of time; what each found is on disk as soon as it ends."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness.interrupts import interrupts_kept
from harness.record.files import plain, read_json

_UNDER_WAY = "under way"

Stage = Callable[[float], dict[str, Any]]  # seconds that are left -> what it found


@contextmanager
def boxed(seconds: float, over: threading.Event) -> Iterator[None]:
    """Interrupt the block once the time is over, as a user would, even where a shell lets its background jobs ignore
    interrupts. `over` is set first: whoever catches the interrupt knows it for this one, however early it comes."""
    thread = threading.main_thread().ident
    assert thread is not None and threading.current_thread().ident == thread, "interrupts reach the main thread only"

    def interrupt() -> None:
        over.set()
        signal.pthread_kill(thread, signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(max(seconds, 0.0), interrupt)
    timer.daemon = True
    try:
        with interrupts_kept():
            try:
                timer.start()  # the time may be over before this returns
                yield
            finally:
                timer.cancel()
                if timer.is_alive():
                    timer.join()  # an interrupt that is on its way arrives here, not at whoever comes next
    finally:
        try:
            signal.signal(signal.SIGINT, before)
        except KeyboardInterrupt:  # it runs the handlers of what has arrived, before it sets the new one
            signal.signal(signal.SIGINT, before)
            raise


class DeviceLost(RuntimeError):
    """The GPU has failed for this process: no stage behind this one can use it."""


class Record:
    """`gpu.json` in a folder: a new one, or without `facts` the one that is there, to go on with. `after` is called
    with all results whenever one has come."""

    def __init__(
        self, folder: Path, facts: dict[str, Any] | None, *, budget_s: float, after: Callable[[dict], None]
    ) -> None:
        self._path = folder / "gpu.json"
        self._started_s, self._budget_s, self._after = time.monotonic(), budget_s, after
        self.content: dict[str, Any] = {**facts, "stages": {}} if facts is not None else read_json(self._path)
        self.save()

    def reload(self) -> None:
        """Read the record again as another process has left it."""
        self.content = read_json(self._path)

    def found(self, name: str) -> dict[str, Any]:
        """Return what a stage has found, as far as it got."""
        found: dict[str, Any] = self.content["stages"].get(name, {})
        return found

    def broken_off(self, names: Sequence[str], reason: str) -> list[str]:
        """Note that a process for these stages ended before it had done them all. Returns the stages that another
        process should do: those that had not begun, and those that had begun run by run, from the next run on."""
        undone = [name for name in names if self.found(name).get("status", _UNDER_WAY) == _UNDER_WAY]
        first = next((name for name in undone if self.found(name)), undone[0] if undone else None)
        if first is not None and "runs" not in self.found(first):
            self._put(first, {"status": "failed", "reason": reason}, 0.0)
            undone.remove(first)
        return undone

    @property
    def left_s(self) -> float:
        return self._budget_s - (time.monotonic() - self._started_s)

    def run(self, name: str, stage: Stage, *, needs_s: float) -> dict[str, Any] | None:
        """Run a stage and return its results; not begun with less than `needs_s` left.

        Returns None where it failed, or where there was or came to be no time: what it has kept until then stays.
        """
        if self.left_s < needs_s:
            self._put(name, {"status": "skipped", "reason": f"{self.left_s:.0f} s left, it needs {needs_s:.0f} s"}, 0.0)
            return None
        begun_s = time.monotonic()
        print(f"== {name} ({self.left_s:.0f} s left)", flush=True)
        self.keep(name, {key: value for key, value in self.found(name).items() if key == "runs"})
        over = threading.Event()
        try:
            with boxed(self.left_s, over):
                found = stage(self.left_s)
        except KeyboardInterrupt:
            if not over.is_set():
                raise
            self._put(name, {"status": "cut off", "reason": f"the budget of {self._budget_s:.0f} s is spent"}, begun_s)
            return None
        except DeviceLost:
            raise
        except Exception as error:  # the other stages may still tell something
            traceback.print_exc()
            self._put(name, {"status": "failed", "reason": f"{type(error).__name__}: {error}"}, begun_s)
            return None
        self._put(name, {"status": "ok", **found}, begun_s)
        return found

    def keep(self, name: str, found: dict[str, Any]) -> None:
        """Keep what a stage that is under way has found so far."""
        self.content["stages"][name] = {"status": _UNDER_WAY, **found}
        self.save()

    def _put(self, name: str, found: dict[str, Any], begun_s: float) -> None:
        seconds = time.monotonic() - begun_s if begun_s else 0.0
        kept = self.content["stages"].get(name, {})
        self.content["stages"][name] = {**kept, **found, "seconds": round(seconds, 2)}
        if found["status"] != "ok":
            print(f"   {name}: {found['status']}: {found['reason']}", flush=True)
        self.save()

    def save(self) -> None:
        partial = self._path.with_suffix(".partial")
        partial.write_text(json.dumps(plain(self.content), indent=1) + "\n")
        os.replace(partial, self._path)
        self._after(self.content)
