"""One command computes all simulated reports, its rows side by side."""

from __future__ import annotations

import os

import pytest

from paper_figures import __main__ as everything
from paper_figures import pool
from paper_figures.support import REFERENCE

WRITTEN_BY = {"runs": "kv", "summary": "summary"}  # steps of MoE-Lens whose files have other names
OF_A_STEP = {"prescope"}  # papers whose reports are one step


def where_it_ran(case: int) -> tuple[int, int]:
    if case < 0:
        raise ValueError(f"case {case}")
    return case, os.getpid()


def test_rows_come_in_the_order_of_their_cases_from_several_processes(monkeypatch):
    monkeypatch.setattr(pool, "num_cores", lambda: 2)
    rows = list(pool.each(where_it_ran, range(20)))
    assert [case for case, _ in rows] == list(range(20))
    assert os.getpid() not in {process for _, process in rows}
    found = pool.each(where_it_ran, [1, -1, 2])
    assert next(found)[0] == 1
    with pytest.raises(ValueError, match="case -1"):
        next(found)


@pytest.mark.parametrize(("cores", "cases"), [(1, [1, 2]), (4, [1]), (4, [])])
def test_one_row_or_one_core_needs_no_other_process(monkeypatch, cores, cases):
    monkeypatch.setattr(pool, "num_cores", lambda: cores)
    assert list(pool.each(where_it_ran, cases)) == [(case, os.getpid()) for case in cases]


def test_every_committed_simulated_file_has_a_step():
    files = [path for path in REFERENCE.glob("*-simulated/*.json") if path.parent.name != "families"]
    known = {step.partition(".")[2] for step in everything.STEPS}
    papers = {step for step in everything.STEPS if "." not in step}
    assert papers == OF_A_STEP and len(files) > 30
    for path in files:
        of_paper = path.parent.name.removesuffix("-simulated") in papers
        names = {path.stem} | {step for step, start in WRITTEN_BY.items() if path.stem.startswith(start)}
        assert of_paper or names & known, path


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
