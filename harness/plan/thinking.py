"""Measure what a strategy's own thread works out after it has waited: which experts go where, and what to fetch.

A calibration cannot know that, since it is every strategy's own Python. So some passes are simulated once for each
strategy and its settings, and the processor time counts that the thread takes from an answer for which it has waited
until its next submission or wait. What it does between passes, and to make and submit ops, a calibration knows.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from harness.calibration.local import identity
from harness.engine import loop
from harness.engine.engine import Engine
from harness.engine.strategy import PassResult, Strategy
from harness.model.cache import cache_folder, make_writable
from harness.model.spec import ModelSpec
from harness.record.passes import PassRecord
from harness.record.provenance import fingerprint
from harness.settings import Settings

_PASSES, _FIRST_PASSES = 24, 2  # that are simulated, and how many of these only warm up


def thinking_s(settings: Settings, spec: ModelSpec, draft: Callable[[], tuple[Engine, Strategy]]) -> float:
    """Return the seconds that follow each wait, from the cache, or measured now on what `draft` makes. Kept there, they
    are the same in all later runs."""
    path = _path(settings, spec)
    with suppress(OSError, ValueError, KeyError, TypeError):  # none, or none that can be read
        return float(json.loads(path.read_text())["thinking_s"])
    seconds = measured(*draft())
    make_writable(path.parent)
    path.write_text(json.dumps({"thinking_s": seconds, "strategy": settings.strategy}, default=str))
    return seconds


def measured(engine: Engine, strategy: Strategy, clock: Callable[[], float] = time.thread_time) -> float:
    """Simulate some passes; return the mean seconds of the thread that follow a wait, 0 where it never waits."""
    engine.machine.drain()
    watch = _Watch(engine.machine, strategy.pipeline, clock)
    with suppress(_EnoughError):
        loop.run(engine, strategy, watch.passed)
    return watch.thought_s / watch.num_waits if watch.num_waits else 0.0


def _path(settings: Settings, spec: ModelSpec) -> Path:
    known = {"table": identity(settings, spec), "strategy": settings.strategy, "code": fingerprint(("strategies",))}
    key = hashlib.sha256(json.dumps(known, sort_keys=True, default=str).encode()).hexdigest()[:12]
    return cache_folder() / "calibration" / f"thinking-{settings.strategy_name}-{key}.json"


class _EnoughError(Exception):
    """The signal that no more passes are asked for."""


class _Watch:
    """Adds up what the thread takes within passes, from a wait until its next submission or wait, and counts waits."""

    def __init__(self, machine: Any, pipeline: Any, clock: Callable[[], float]) -> None:
        self.thought_s, self.num_waits = 0.0, 0
        self._clock, self._since_s, self._num_passes = clock, -1.0, 0
        self._in_pass = False
        self._run = pipeline.run
        pipeline.run = self._pass
        for name in ("submit", "wait", "wait_any"):
            setattr(machine, name, self._watched(getattr(machine, name), waits=name != "submit"))

    def passed(self, record: PassRecord) -> None:
        """Count a pass; the first ones load and remember what later ones find."""
        self._num_passes += 1
        if self._num_passes == _FIRST_PASSES:
            self.thought_s, self.num_waits = 0.0, 0
        if self._num_passes == _PASSES:
            raise _EnoughError

    def _pass(self, *given: Any) -> PassResult:
        self._in_pass, self._since_s = True, -1.0
        found: PassResult = self._run(*given)
        self._in_pass = False
        return found

    def _watched(self, call: Callable[..., Any], *, waits: bool) -> Callable[..., Any]:
        def watched(*given: Any, **named: Any) -> Any:
            if self._in_pass and self._since_s >= 0:
                self.thought_s += self._clock() - self._since_s
            found = call(*given, **named)
            self.num_waits += waits
            self._since_s = self._clock() if waits else -1.0
            return found

        return watched
