"""The solver of the policy search against brute force, and its answers in any order."""

from __future__ import annotations

from itertools import product

import highspy
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strategies.offloading.planning import solver
from strategies.offloading.planning.solver import Rows, least

MOST = 4
number = st.integers(-5, 5)


@st.composite
def programs(draw):
    """Three whole numbers from 0 to `MOST`, and what limits them."""
    objective = np.array([draw(number) for _ in range(3)], float)
    rows = [
        (np.array([draw(number) for _ in range(3)], float), draw(st.sampled_from((-np.inf, -2.0, 1.0))), draw(number))
        for _ in range(draw(st.integers(1, 4)))
    ]
    return objective, Rows.of([(row, min(low, high), float(high)) for row, low, high in rows])


def solved(objective, rows, whole=None):
    return least(objective, rows, np.zeros(3), np.full(3, float(MOST)), whole)


@settings(max_examples=150)
@given(programs())
def test_no_whole_numbers_do_better_and_fractions_do_no_worse(program):
    objective, rows = program
    points = [np.array(point) for point in product(range(MOST + 1), repeat=3)]
    fitting = [p for p in points if ((rows.low <= rows.matrix @ p) & (rows.matrix @ p <= rows.high)).all()]
    found, relaxed = solved(objective, rows, np.ones(3)), solved(objective, rows)
    assert (found is None) == (not fitting)
    if fitting:
        best = min(objective @ point for point in fitting)
        assert objective @ found == pytest.approx(best, abs=1e-6)
        assert objective @ relaxed <= best + 1e-6


@settings(max_examples=25)
@given(st.lists(programs(), min_size=2, max_size=6))
def test_a_solution_does_not_depend_on_those_before_it(drawn):
    def alone(program, whole):
        solver._solver.cache_clear()
        return solved(*program, whole)

    for whole in (None, np.ones(3)):
        expected = [alone(program, whole) for program in drawn]
        assert np.array_equal([solved(*each, whole) is None for each in drawn], [each is None for each in expected])
        for program, solution in [*zip(drawn, expected, strict=True)][::-1]:
            if solution is not None:
                assert np.array_equal(solved(*program, whole), solution), "to the last bit"


def test_all_programs_have_the_same_tolerance():
    """HiGHS keeps the one that it takes for whole numbers."""
    rows, tolerances = Rows.of([(np.array([1.0, 2.0, 3.0]), 1.5, np.inf)]), []
    for whole in (None, np.ones(3), None):
        solved(np.ones(3), rows, whole)
        tolerances.append(solver._solver().getOptionValue("primal_feasibility_tolerance")[1])
    assert tolerances[0] == tolerances[2] == 1e-7


def test_the_solver_prints_nothing(capfd):
    """A plan may be printed as JSON."""
    solver._solver.cache_clear()
    rows = Rows.of([(np.array([1.0, 1.0, 1.0]), 2.5, np.inf)])
    assert solved(np.ones(3), rows, np.ones(3)).sum() == pytest.approx(3)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("whole", [None, np.ones(3)])
def test_where_the_solver_gives_up_it_tries_the_other_way(monkeypatch, whole):
    """HiGHS ends some small programs with a "solve error" with presolving, or without."""
    rows = Rows.of([(np.array([1.0, 2.0, 3.0]), 4.0, np.inf)])
    expected, real = solved(np.array([1.0, 1.0, 2.0]), rows, whole), solver._solver()
    told = []

    class GivingUp:
        def __getattr__(self, name):
            return getattr(real, name)

        def getModelStatus(self):
            told.append(real.getOptionValue("presolve")[1])
            return highspy.HighsModelStatus.kSolveError if len(told) == 1 else real.getModelStatus()

    monkeypatch.setattr(solver, "_solver", GivingUp)
    assert solved(np.array([1.0, 1.0, 2.0]), rows, whole) == pytest.approx(expected)
    assert sorted(told) == ["off", "on"]
