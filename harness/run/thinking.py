"""Measure what a strategy's own thread works out after it has waited: which experts go where, and what to fetch.

A calibration cannot know that, since it is every strategy's own Python. So passes of the run are simulated once, and
the processor time counts that the thread takes within them between its calls of the machine, but for what ends at a
submission that is not the first one behind a wait. What it does between passes, and to make ops, a calibration knows;
only the making of the first op behind a wait counts twice. Behind each wait the core's own caches are swept, as they
are where lanes have read weights meanwhile: the same work takes 1.4 to 2.4 times as long then, and 1.5 to 1.8 times in
emulated runs.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from harness.calibration.local import calibrate, identity
from harness.config import file_name
from harness.engine import loop
from harness.engine.engine import Engine
from harness.engine.garbage import let_go
from harness.engine.strategy import Strategy
from harness.machine.simulated import SimulatedMachine
from harness.model.cache import cache_folder
from harness.record.files import RecordError, write_json
from harness.record.passes import PassRecord
from harness.record.provenance import fingerprint
from harness.run.session import Session

_PASSES, _FIRST_PASSES = 12, 2  # at most; and those that load and remember what later ones find
_SWEPT_BYTES = 8_000_000  # several times what a core's own caches hold
_DECIDING = ("model", "hardware", "strategy", "dataset", "routing", "kv_cache_gb", "kv_block_tokens")


def let_think(session: Session) -> None:
    """Let the thread of a strategy that is ready to run work on behind its waits, where a virtual clock stands for this
    computer. How long is measured now if it never was for this configuration and code, and kept for later runs."""
    if not (isinstance(session.machine, SimulatedMachine) and session.settings.hardware.calibrated):
        return
    path = _path(session)
    with suppress(OSError, ValueError, KeyError, TypeError):  # none, or none that can be read
        session.machine.thinking_s = float(json.loads(path.read_text())["thinking_s"])
        return
    session.machine.thinking_s = measured(*_again(session))
    with suppress(OSError, RecordError):  # a cache for reading only keeps nothing
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {"thinking_s": session.machine.thinking_s})


def measured(engine: Engine, strategy: Strategy, clock: Callable[[], float] = time.thread_time) -> float:
    """Simulate some passes; return the mean seconds of the thread that follow a wait, 0 where it never waits.

    Engine and strategy are of no use then.
    """
    machine = engine.machine
    machine.drain()
    watch = _Watch(machine, clock)
    with suppress(_EnoughError):
        loop.run(engine, strategy, watch.passed)
    let_go(*machine.tiers.values(), engine, machine)
    return watch.mean_s


def _again(session: Session) -> tuple[Engine, Strategy]:
    twin = Session.of(session.values)
    twin.load_model()
    twin.load_workload()
    twin.build_machine(calibrate)  # which is known by now
    twin.queue_requests()
    return twin.build_engine(), twin.build_strategy()


def _path(session: Session) -> Path:
    assert session.model is not None, "what is measured depends on the model"
    known = {
        "table": identity(session.settings, session.model.spec),
        "code": fingerprint(("harness", "strategies")),
        **{name: session.values.get(name) for name in _DECIDING},
    }
    key = hashlib.sha256(json.dumps(known, sort_keys=True, default=str).encode()).hexdigest()[:12]
    return cache_folder() / "calibration" / f"thinking-{file_name(session.settings.strategy_name)}-{key}.json"


class _EnoughError(Exception):
    """The signal that no more passes are asked for."""


class _Watch:
    """Adds up what the thread takes within passes, as the module text says, and counts waits."""

    def __init__(self, machine: Any, clock: Callable[[], float]) -> None:
        self._machine, self._clock = machine, clock
        self._thought_s, self._num_waits, self._num_passes = 0.0, 0, 0
        self._first = (0.0, 0)  # of both, in the first passes
        self._since_s: float | None = None  # None outside of passes
        self._behind_wait = False  # nothing was submitted since
        self._swept = np.ones(_SWEPT_BYTES // 8)
        for name in ("submit", "wait", "wait_any", "now", "cancel"):
            setattr(machine, name, self._watched(name, getattr(machine, name)))

    @property
    def mean_s(self) -> float:
        """The mean that follows a wait: behind the first passes, if any came."""
        thought_s, num_waits = self._thought_s - self._first[0], self._num_waits - self._first[1]
        if not num_waits:
            thought_s, num_waits = self._thought_s, self._num_waits
        return thought_s / num_waits if num_waits else 0.0

    def passed(self, record: PassRecord) -> None:
        """Count a pass; enough are those that are asked for, or the first ones if the thread waits in none."""
        self._num_passes += 1
        self._machine.spans.clear()
        if self._num_passes == _FIRST_PASSES:
            self._first = self._thought_s, self._num_waits
        if self._num_passes == _PASSES or (self._num_passes == _FIRST_PASSES and not self._num_waits):
            raise _EnoughError

    def _watched(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        waits, submits = name.startswith("wait"), name == "submit"

        def watched(*given: Any, **named: Any) -> Any:
            in_pass, since_s = self._machine.in_pass, self._since_s
            if in_pass and since_s is not None and (self._behind_wait or not submits):
                self._thought_s += self._clock() - since_s
            found = call(*given, **named)  # what the machine does does not count
            self._num_waits += waits and in_pass
            self._behind_wait = in_pass and (waits or (self._behind_wait and not submits))
            if waits and in_pass:
                self._swept.sum()
            self._since_s = self._clock() if in_pass else None
            return found

        return watched
