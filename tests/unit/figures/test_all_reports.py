"""One command computes all simulated reports, its rows side by side."""

from __future__ import annotations

import gc
import os
import signal
import time
import weakref
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress

import pytest

from harness.config import ConfigError
from harness.plan.planning import DoesNotFit
from paper_figures import __main__ as everything
from paper_figures import pool
from paper_figures.latency import caches, grid
from paper_figures.moegen import rows
from paper_figures.moelightning import several_gpus
from paper_figures.support import REFERENCE


def where_it_ran(case: int) -> tuple[int, int]:
    if case == -1:
        raise ConfigError("case", "must not be -1")
    if case == -2:
        raise DoesNotFit("too little", {"device": {"weights": 2}}, {"device": 1})
    if case == -9:
        os.kill(os.getpid(), signal.SIGKILL)
    return case, os.getpid()


def slowly(seconds: float) -> int:
    time.sleep(seconds)
    return os.getpid()


def test_rows_come_in_the_order_of_their_cases_from_several_processes(monkeypatch):
    monkeypatch.setattr(pool, "num_cores", lambda: 2)
    found = list(pool.each(where_it_ran, range(20)))
    assert [case for case, _ in found] == list(range(20))
    assert os.getpid() not in {process for _, process in found}


def test_what_a_row_raises_comes_whole_from_its_process(monkeypatch):
    monkeypatch.setattr(pool, "num_cores", lambda: 2)
    found = pool.each(where_it_ran, [1, -1, 2])
    assert next(found)[0] == 1
    with pytest.raises(ConfigError, match="^case: must not be -1$") as raised:
        next(found)
    assert (raised.value.field, raised.value.message) == ("case", "must not be -1")
    with pytest.raises(DoesNotFit, match="^too little$") as refused:
        list(pool.each(where_it_ran, [-2, 1]))
    assert (refused.value.needed, refused.value.there_is) == ({"device": {"weights": 2}}, {"device": 1})


def test_a_process_that_is_killed_ends_the_command_with_its_cause(monkeypatch):
    monkeypatch.setattr(pool, "num_cores", lambda: 2)
    with pytest.raises(ConfigError, match=r"^memory: a process was killed while row \d of 4 "):
        list(pool.each(where_it_ran, [1, -9, 2, 3]))


def test_rows_that_nobody_waits_for_any_more_are_given_up(monkeypatch):
    monkeypatch.setattr(pool, "num_cores", lambda: 2)
    began_s = time.monotonic()
    found = pool.each(slowly, [0.0, 600.0, 600.0])
    process = next(found)
    found.close()
    assert time.monotonic() - began_s < 60
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


def noted(case: tuple[str, int]) -> tuple[int, str]:
    path, number = case
    with open(path, "a") as file:
        file.write(f"{number}\n")
    return os.getpid(), os.environ["OPENBLAS_NUM_THREADS"]


def test_rows_that_began_ahead_are_computed_once_elsewhere_and_without_threads_that_spin(monkeypatch, tmp_path):
    monkeypatch.setattr(pool, "num_cores", lambda: 2)
    path = tmp_path / "computed"
    pool.begin(noted, [(str(path), 1), (str(path), 2)])
    pool.begin(noted, [(str(path), 2), (str(path), 3)])
    found = [*pool.each(noted, [(str(path), 3)]), *pool.each(noted, [(str(path), 2), (str(path), 1)])]
    assert os.getpid() not in {process for process, _ in found}
    assert {threads for _, threads in found} == {"1"}
    assert sorted(path.read_text().split()) == ["1", "2", "3"]
    list(pool.each(noted, [(str(path), 1), (str(path), 4)]))
    assert sorted(path.read_text().split()) == ["1", "1", "2", "3", "4"], "asked for again"


def test_what_began_ahead_is_given_up_with_all_others(monkeypatch):
    monkeypatch.setattr(pool, "num_cores", lambda: 2)
    with pytest.raises(ConfigError, match="must not be -1"):
        for _ in pool.each(where_it_ran, [1, -1]):
            pool.begin(slowly, [600.0, 600.0])
    began_s = time.monotonic()
    assert len(list(pool.each(where_it_ran, [1, 2]))) == 2 and time.monotonic() - began_s < 60


def test_rows_that_begin_in_a_pool_whose_process_was_killed_end_with_its_cause(monkeypatch):
    monkeypatch.setattr(pool, "num_cores", lambda: 2)
    pool.begin(where_it_ran, [-9])
    with pytest.raises(BrokenProcessPool):
        pool._begun[where_it_ran, -9].result()
    with pytest.raises(ConfigError, match="^memory: a process was killed while a row was computed"):
        pool.begin(where_it_ran, [1])
    pool.end()
    assert [case for case, _ in pool.each(where_it_ran, [1, 2])] == [1, 2]


@pytest.mark.parametrize("fails", [lambda: 1, lambda: 1 / 0])
def test_a_step_that_fails_leaves_no_row_of_the_next_one(monkeypatch, fails):
    monkeypatch.setattr(pool, "num_cores", lambda: 2)
    monkeypatch.setattr(everything, "STEPS", {"a": fails, "b": fails})
    monkeypatch.setattr(everything, "AHEAD", {"a": (slowly, lambda: [0.0]), "b": (slowly, lambda: [600.0, 601.0])})
    began_s = time.monotonic()
    with suppress(ZeroDivisionError):
        assert everything.main([]) == 1
    assert not pool._begun and not pool._processes.cache_info().currsize
    assert time.monotonic() - began_s < 60


class _AskedError(Exception):
    pass


@pytest.mark.parametrize("step", everything.AHEAD)
def test_ahead_of_a_step_begins_what_it_will_ask_for(monkeypatch, step):
    asked = []

    def each(row, cases):
        asked.append((row, list(cases)))
        raise _AskedError

    for module in (rows, grid, caches, several_gpus):
        monkeypatch.setattr(module, "each", each)
    row, cases = everything.AHEAD[step]
    with pytest.raises(_AskedError):
        everything.STEPS[step]()
    assert asked == [(row, list(cases()))] and len(asked[0][1]) > 3


def test_a_step_and_the_next_one_begin_in_their_order(monkeypatch):
    began = []
    monkeypatch.setattr(everything, "STEPS", dict.fromkeys(("a", "b", "c", "d"), lambda: began.append("run") or 0))
    monkeypatch.setattr(everything, "AHEAD", {name: (name, lambda: [1]) for name in "acd"})
    monkeypatch.setattr(everything, "begin", lambda row, cases: began.append(row))
    assert everything.main([]) == 0
    assert began == ["a", "run", "run", "c", "d", "run", "d", "run"]


@pytest.mark.parametrize(("cores", "cases"), [(1, [1, 2]), (4, [1]), (4, [])])
def test_one_row_or_one_core_needs_no_other_process(monkeypatch, cores, cases):
    monkeypatch.setattr(pool, "num_cores", lambda: cores)
    assert list(pool.each(where_it_ran, cases)) == [(case, os.getpid()) for case in cases]


def test_every_committed_simulated_file_has_a_step():
    files = list(REFERENCE.glob("*-simulated/*.json"))
    assert len(files) > 30
    for path in files:
        paper = path.parent.name.removesuffix("-simulated")
        of_run = path.stem.startswith("kv") and paper == "moelens"
        names = {paper, f"{paper}.{'runs' if of_run else path.stem}"}
        if paper == "moelightning":
            names.add(f"moelens.{path.stem}")  # as MoE-Lens profiles it
        assert names & everything.STEPS.keys(), path


def test_steps_are_named_alone_or_by_their_paper(capsys):
    assert everything.chosen([]) == list(everything.STEPS)
    some = everything.chosen(["latency", "moelens.summary"])
    assert some == ["moelens.summary", "latency.systems", "latency.caches", "latency.where"]
    assert everything.main(["--list", "latency.where"]) == 0
    assert capsys.readouterr().out == "latency.where\n"
    assert everything.main(["latencies"]) == 2
    assert "STEP: must be one of" in capsys.readouterr().err


def test_a_step_that_fails_ends_the_command(monkeypatch):
    ran = []
    steps = {"one.a": lambda: ran.append("a") or 0, "one.b": lambda: ran.append("b") or 1, "two": lambda: 0}
    monkeypatch.setattr(everything, "STEPS", steps)
    assert everything.main([]) == 1 and ran == ["a", "b"]


class _Loop:
    """Holds itself, as a simulated machine does."""

    def __init__(self) -> None:
        self.itself = self


def how_it_searches(case: int) -> tuple[int, int]:
    return gc.get_threshold()[0], gc.get_freeze_count()


def test_processes_search_for_cycles_seldom_and_not_among_what_they_imported(monkeypatch):
    monkeypatch.setattr(pool, "num_cores", lambda: 2)
    for objects, frozen in pool.each(how_it_searches, range(4)):
        assert objects == pool._OBJECTS > gc.get_threshold()[0] and frozen > 10_000


def row_of(count: int) -> weakref.ref:
    return weakref.ref([_Loop() for _ in range(count)][-1])


def alive_behind(monkeypatch, counts: list[int], **settings: int) -> list[bool]:
    """Whether anything of each row is still there once the last one is, with these settings of the pool."""
    monkeypatch.setattr(pool, "num_cores", lambda: 1)
    for name, value in settings.items():
        monkeypatch.setattr(pool, name, value)
    thresholds = gc.get_threshold()
    gc.collect()
    made = pool.each(row_of, counts)
    found = [next(made) for _ in counts]
    alive = [each() is not None for each in found]
    made.close()
    assert gc.get_threshold() == thresholds
    return alive


def test_little_that_rows_leave_behind_is_not_searched_for(monkeypatch):
    assert alive_behind(monkeypatch, [50_000, 50_000]) == [True, True]


def test_much_that_rows_leave_behind_is_gone(monkeypatch):
    assert alive_behind(monkeypatch, [10_000, 60_000], _OBJECTS_OF_ROWS=50_000) == [False, False]


def test_what_was_in_use_at_a_search_within_its_row_is_gone_behind_it(monkeypatch):
    settings = {"_OBJECTS_OF_ROWS": 1 << 40, "_OBJECTS": 100_000}
    assert alive_behind(monkeypatch, [60_000, 60_000], **settings) == [False, False]
