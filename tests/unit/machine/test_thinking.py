"""What a strategy's thread works out behind its waits: how it is measured, kept and spent."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from harness.machine.base import GPU
from harness.model.planned import planned_model
from harness.plan import thinking
from harness.settings import parse_settings
from paper_figures.support import composed
from tests.unit.machine.test_simulated import Unit, machine


def test_the_thread_works_on_after_each_wait_and_lanes_go_on_meanwhile():
    m = machine()
    m.thinking_s = 0.25
    first, second = m.submit(GPU, Unit(1.0)), m.submit(GPU, Unit(2.0))
    m.wait(first)
    third = m.submit(GPU, Unit(1.0))
    assert m.now() == 1.25
    m.wait_any([second])
    m.wait(second)  # over already: the thread works on all the same
    assert m.now() == 3.5
    m.submit(GPU, Unit(1.0))
    m.drain()
    assert (second.started_s, third.started_s) == (1.0, 3.0)


class Scripted:
    """Machine and pipeline at once: what happens takes the thread what is written behind it."""

    def __init__(self) -> None:
        self.clock_s = 0.0

    def submit(self) -> None:
        self.clock_s += 1000.0  # emulated, where this is the machine's own

    wait = wait_any = submit

    def works(self, seconds: float) -> None:
        self.clock_s += seconds

    def run(self, plan) -> str:
        self.works(20.0)  # before any wait
        self.submit()
        self.works(40.0)  # to make ops
        self.wait()
        self.works(1.0)
        self.wait_any()
        self.works(2.0)
        self.submit()
        self.works(60.0)
        self.wait()
        self.works(4.0)
        self.submit()
        self.wait()
        self.works(80.0)  # up to the pass's end
        return f"result of {plan}"


def test_thinking_is_what_follows_a_wait_up_to_the_next_call_within_a_pass():
    it = Scripted()
    watch = thinking._Watch(it, it, lambda: it.clock_s)
    for number in range(thinking._FIRST_PASSES):
        it.works(3.0 * number)
        assert it.run("a pass") == "result of a pass"
        watch.passed(None)
    assert (watch.thought_s, watch.num_waits) == (0.0, 0), "the first passes load and remember"
    it.run("another")
    it.wait()  # for the tokens, between passes
    it.works(100.0)
    it.submit()
    assert (watch.thought_s, watch.num_waits) == (7.0, 5)
    with pytest.raises(thinking._EnoughError):
        for _ in range(thinking._PASSES):
            watch.passed(None)


def test_it_is_measured_once_for_each_strategy_and_its_settings(tmp_path, monkeypatch):
    monkeypatch.setenv("MOE_HARNESS_CACHE", str(tmp_path / "cache"))
    drafts = []

    def measured(engine, strategy):
        drafts.append((engine, strategy))
        return 0.125 * len(drafts)

    def seconds_of(*overrides: str) -> float:
        settings = parse_settings(composed("model=mixtral-mini", "hardware=laptop", *overrides))
        spec = planned_model(settings.model).spec
        return thinking.thinking_s(settings, spec, lambda: ("engine", SimpleNamespace()))

    monkeypatch.setattr(thinking, "measured", measured)
    assert seconds_of("strategy=fate") == seconds_of("strategy=fate") == 0.125
    assert seconds_of("strategy=fate", "strategy.batch_size=3") == 0.25
    assert seconds_of("strategy=fiddler") == 0.375
    assert seconds_of("strategy=fate") == 0.125 and len(drafts) == 3
    for path in (tmp_path / "cache").glob("calibration/thinking-fate-*"):
        path.write_text("cut off{")
    assert seconds_of("strategy=fate") == 0.5, "what cannot be read is measured again"
