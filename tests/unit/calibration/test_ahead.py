"""Ops that are launched ahead: their own time and that of their launching, on a device whose both are known."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest

from harness.bench.shapes import Shape
from harness.calibration import undisturbed
from harness.calibration.ahead import LaunchedAhead
from harness.calibration.probes import ContextRoom, LayerProbes
from harness.calibration.undisturbed import Undisturbed
from harness.machine.base import GPU
from tests.contract.running import CAPACITIES_BYTES, emulated, engine_on
from tests.fake_device import FakeDevice, FakeStream, cuda_machine

SHAPES = (Shape.of_prompts(64, 32), Shape(contexts=(40,) * 4))
KINDS = {
    *("embed", "attention in", "prefill attention", "decode attention (device)", "decode attention (paged)"),
    *("append kv (device)", "attention out", "predict experts", "combine", "head", "experts x1", "experts x8"),
    *("experts x1, given rows", "experts x1, together"),
}


class SlowDevice(FakeDevice):
    """Takes so long to be given a kernel, and so long to run it."""

    def __init__(self, *, launching_s: float, own_s: float) -> None:
        super().__init__(longest_pause_s=0.0)
        self._launching_s, self._own_s = launching_s, own_s

    def launch(self, stream: FakeStream, run: Callable[[], Any]) -> None:
        def slowly() -> None:
            time.sleep(self._own_s)
            run()

        time.sleep(self._launching_s)
        stream.push(slowly)


def measured(machine, checkpoint) -> LaunchedAhead:
    engine = engine_on(machine, checkpoint, [], kv_blocks=400, block_size=16)
    probes = LayerProbes(engine, room=ContextRoom(), max_tokens=128, packet_bytes=100_000)
    ahead = LaunchedAhead(engine, probes, Undisturbed())
    try:
        ahead.measure(SHAPES, lambda text: None)
    finally:
        probes.close()
        machine.close()
    return ahead


def seconds(points: dict[str, Any]) -> list[float]:
    return [s for by_key in points.values() for _, s in by_key]


@pytest.mark.slow
def test_own_time_and_launching_are_told_apart(tiny):
    device = SlowDevice(launching_s=5e-4, own_s=2e-2)
    ahead = measured(cuda_machine(CAPACITIES_BYTES, device=device, poison=False), tiny)
    assert {key.removeprefix("gpu: ") for key in ahead.own} == KINDS
    assert ahead.own.keys() == ahead.launching.keys()
    assert min(seconds(ahead.own)) >= 2e-2 * 0.99 and min(seconds(ahead.launching)) >= 5e-4
    assert median(seconds(ahead.launching)) < 2e-2
    for key, points in ahead.launching.items():
        assert min(s for _, s in points) < 8e-3, f"{key} waited for what was in front of it"
    device.close()


@pytest.mark.slow
def test_what_was_not_launched_ahead_does_not_count(tiny):
    device = SlowDevice(launching_s=8e-3, own_s=1e-3)
    ahead = measured(cuda_machine(CAPACITIES_BYTES, device=device, poison=False), tiny)
    assert not ahead.own and not ahead.launching
    device.close()


@dataclass(frozen=True)
class Launched:
    """An op of one feature that took so long, and its ticket."""

    feature: float
    finished_s: float
    lane = GPU
    cost_key = "norm"
    joined = 1
    started_s = 0.0

    @property
    def op(self) -> Launched:
        return self

    def cost_features(self) -> tuple[float]:
        return (self.feature,)


def test_disturbed_draws_count_only_where_there_is_no_other(monkeypatch):
    shares = iter((0.5, 0.0, 0.0, 0.0, 0.5, 0.0))  # of the cores, that others had during each draw
    times = SimpleNamespace(taken_share_since=lambda before: next(shares))
    monkeypatch.setattr(undisturbed, "read_cpu_times", lambda: times)
    monkeypatch.setattr(undisturbed, "MAX_ATTEMPTS", 1)
    engine: Any = SimpleNamespace(machine=SimpleNamespace(launches_ahead=True))
    probes: Any = SimpleNamespace(some_experts=None)
    ahead = LaunchedAhead(engine, probes, Undisturbed())
    draws = iter((9.0, 1.0, 1.0, 2.0, 8.0, 2.0))
    monkeypatch.setattr(
        ahead, "_launched", lambda shape, chain: [(Launched(shape.num_tokens, took := next(draws)), took / 10)]
    )
    ahead.measure(SHAPES, lambda text: None)
    assert ahead.own == {"gpu: norm": [((64.0,), 1.0), ((64.0,), 1.0), ((4.0,), 2.0), ((4.0,), 2.0)]}
    assert ahead.launching == {"gpu: norm": [((64.0,), 0.1), ((64.0,), 0.1), ((4.0,), 0.2), ((4.0,), 0.2)]}


def test_a_machine_that_runs_ops_by_threads_launches_none_ahead(tiny):
    ahead = measured(emulated(), tiny)
    assert not ahead.own and not ahead.launching


@pytest.fixture(autouse=True)
def few_draws(monkeypatch):
    monkeypatch.setattr("harness.calibration.ahead._DRAWS", 1)
