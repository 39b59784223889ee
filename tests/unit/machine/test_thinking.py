"""What a strategy's thread works out behind its waits: how it is measured, kept and spent."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from harness.machine.base import GPU
from harness.model.planned import planned_model
from harness.run import thinking
from harness.run.session import Session
from paper_figures.support import composed
from tests.unit.machine.test_simulated import Unit, machine


def test_the_thread_works_on_after_each_wait_and_lanes_go_on_meanwhile():
    m = machine()
    m.thinking_s, m.in_pass = 0.25, True
    first, second = m.submit(GPU, Unit(1.0)), m.submit(GPU, Unit(2.0))
    m.wait(first)
    third = m.submit(GPU, Unit(1.0))
    assert m.now() == 1.25
    m.wait_any([second])
    m.wait(second)  # over already: the thread works on all the same
    assert m.now() == 3.5
    m.in_pass = False
    m.wait(m.submit(GPU, Unit(1.0)))
    assert m.now() == 5.0, "nothing is decided between passes"
    assert (second.started_s, third.started_s) == (1.0, 3.0)


class Scripted:
    """Machine and pipeline at once: what happens takes the thread what is written behind it."""

    def __init__(self) -> None:
        self.clock_s, self.in_pass = 0.0, False
        self.spans: list[object] = []

    def submit(self) -> None:
        self.clock_s += 1000.0  # where this is the machine's own

    wait = wait_any = now = cancel = submit

    def works(self, seconds: float) -> None:
        self.clock_s += seconds

    def run(self) -> None:
        self.in_pass = True
        self.works(20.0)  # before any call
        self.now()
        self.works(40.0)  # to make an op: the wait between passes is none of theirs
        self.submit()
        self.works(40.0)  # to make an op
        self.submit()
        self.works(0.5)
        self.cancel()
        self.works(0.5)
        self.now()
        self.works(40.0)  # to make an op
        self.submit()
        self.works(1.0)
        self.wait()
        self.works(0.75)
        self.now()
        self.works(0.25)
        self.wait_any()
        self.works(1.0)
        self.cancel()
        self.works(1.0)
        self.submit()
        self.works(60.0)  # to make an op
        self.submit()
        self.wait()
        self.works(4.0)
        self.submit()
        self.wait()
        self.works(80.0)  # up to the pass's end
        self.in_pass = False


def watched(num_passes: int, first_s: float = 0.0) -> tuple[Scripted, thinking._Watch]:
    """Watch passes, of which the first ones have `first_s` more to load and remember."""
    it = Scripted()
    watch = thinking._Watch(it, lambda: it.clock_s)
    for number in range(num_passes):
        it.run()
        if number < thinking._FIRST_PASSES and first_s:
            it.now()
            it.in_pass = True
            it.wait()
            it.works(first_s)
            it.submit()
            it.in_pass = False
        it.submit()
        it.wait()  # for the tokens, between passes
        it.works(100.0)
        watch.passed(None)
    return it, watch


@pytest.mark.parametrize("num_passes", [1, 2, 3, 10])
def test_thinking_is_what_neither_makes_ops_nor_lies_between_passes(num_passes):
    _, watch = watched(num_passes)
    assert watch.mean_s == pytest.approx(9.0 / 4)


def test_the_first_passes_count_only_where_there_are_no_others():
    assert watched(2, first_s=13.0)[1].mean_s == pytest.approx(22.0 / 5)
    it, watch = watched(3, first_s=13.0)
    assert watch.mean_s == pytest.approx(9.0 / 4)
    it.spans.append("one")
    with pytest.raises(thinking._EnoughError):
        for _ in range(thinking._PASSES):
            watch.passed(None)
    assert it.spans == [], "nobody asks for them"


def test_a_thread_that_never_waits_has_nothing_to_think_of():
    it = Scripted()
    watch = thinking._Watch(it, lambda: it.clock_s)
    with pytest.raises(thinking._EnoughError):
        for _ in range(thinking._FIRST_PASSES):
            it.in_pass = True
            it.submit()
            it.in_pass = False
            it.wait()
            watch.passed(None)
    assert watch.mean_s == 0.0


def test_the_thread_thinks_with_caches_that_the_lanes_have_swept():
    """Otherwise what it needs would lie in its core's own cache, which it does not behind an op."""
    it, swept = Scripted(), []
    watch = thinking._Watch(it, lambda: it.clock_s)
    watch._swept = SimpleNamespace(sum=lambda: swept.append(it.works(5.0)))
    it.run()
    assert len(swept) == 4, "once behind each wait"
    assert watch.mean_s == pytest.approx(9.0 / 4), "which takes the thread no time"


@pytest.fixture
def session(tmp_path, monkeypatch):
    """What is measured once for each configuration: 0.125 s the first time, 0.25 the next."""
    monkeypatch.setenv("MOE_HARNESS_CACHE", str(tmp_path / "cache"))
    found = []

    def measured(*parts) -> float:
        found.append(parts)
        return 0.125 * len(found)

    monkeypatch.setattr(thinking, "measured", measured)
    monkeypatch.setattr(thinking, "_again", lambda session: (session,))

    def thinks(*overrides: str) -> float:
        it = Session.of(composed("model=mixtral-mini", *overrides))
        it.model, it.machine = SimpleNamespace(spec=planned_model(it.settings.model).spec), machine()
        thinking.let_think(it)
        return it.machine.thinking_s

    return thinks


LOCAL = ("hardware=local", "hardware.h2d_gb_s=1", "hardware.d2h_gb_s=1")


def test_it_is_measured_once_for_each_configuration(session, tmp_path):
    assert session("strategy=fate", *LOCAL) == session("strategy=fate", *LOCAL) == 0.125
    assert session("strategy=fate", "strategy.batch_size=3", *LOCAL) == 0.25
    assert session("strategy=fiddler", *LOCAL) == 0.375
    assert session("strategy=fate", "dataset.num_requests=7", *LOCAL) == 0.5
    assert session("strategy=fate", *LOCAL) == 0.125
    for path in (tmp_path / "cache").glob("calibration/thinking-*"):
        path.write_text("cut off{")
    assert session("strategy=fate", *LOCAL) == 0.625, "what cannot be read is measured again"


def test_a_cache_that_cannot_be_written_keeps_nothing(session, tmp_path):
    (tmp_path / "cache").write_text("no folder")
    assert (session("strategy=fate", *LOCAL), session("strategy=fate", *LOCAL)) == (0.125, 0.25)


def test_a_profile_with_stated_rates_stands_for_another_computer(session):
    assert session("strategy=fate", "hardware=a40") == 0.0
