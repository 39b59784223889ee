"""Solve small mixed-integer programs with HiGHS: each anew, so that no solution depends on what was solved before.

Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import highspy
import numpy as np


@dataclass(frozen=True)
class Rows:
    """Rows are the constraints of a program: each sum lies between its least and its most."""

    matrix: Any  # [rows, columns]
    low: Any  # [rows]
    high: Any  # [rows]

    @classmethod
    def of(cls, rows: Iterable[tuple[Any, float, float]]) -> Rows:
        matrix, low, high = zip(*rows, strict=True)
        return cls(np.array(matrix), np.array(low), np.array(high))

    def __add__(self, other: Rows) -> Rows:
        joined = (np.concatenate(pair) for pair in zip(vars(self).values(), vars(other).values(), strict=True))
        return Rows(*joined)


def least(objective: Any, rows: Rows, low: Any, high: Any, whole: Any | None = None) -> Any | None:
    """Return the unknowns between `low` and `high` that minimise the objective; None where no unknowns fit.

    `whole` has a 1 for each unknown that is a whole number; without it none is.
    """
    assert np.isfinite(objective).all() and np.isfinite(rows.matrix).all(), "HiGHS would solve something else"
    num_rows, num_columns = rows.matrix.shape
    columns = np.tile(np.arange(num_columns, dtype=np.int32), num_rows)
    starts = np.arange(0, columns.size, num_columns, dtype=np.int32)
    kinds = np.zeros(num_columns, dtype=np.int32) if whole is None else whole.astype(np.int32)
    by_row, to_minimise = int(highspy.MatrixFormat.kRowwise), int(highspy.ObjSense.kMinimize)
    solver = _solver()
    # HiGHS ends a few programs with a "solve error", with presolving or without it. A small linear program takes longer
    # to presolve than to solve.
    for presolve in ("off", "on") if whole is None else ("on", "off"):
        solver.passOptions(_options(presolve))  # anew: a program with whole numbers leaves a wider tolerance behind
        solver.passModel(
            num_columns, num_rows, columns.size, by_row, to_minimise, 0.0, objective, low, high, rows.low, rows.high,
            starts, columns, rows.matrix.ravel(), kinds,
        )  # fmt: skip
        solver.run()
        status = solver.getModelStatus()
        if status == highspy.HighsModelStatus.kOptimal:
            return np.array(solver.getSolution().col_value)
        if status == highspy.HighsModelStatus.kInfeasible:
            return None
    raise AssertionError(f"the solver gave up: {solver.modelStatusToString(status)}")


class _Quiet(highspy.Highs):
    """HiGHS would print its name where it is made, before it can be told to print nothing."""

    def enableCallbacks(self) -> None:
        self.silent()
        super().enableCallbacks()


@cache
def _solver() -> highspy.Highs:
    return _Quiet()


@cache
def _options(presolve: str) -> highspy.HighsOptions:
    options = highspy.HighsOptions()
    options.output_flag, options.presolve = False, presolve
    options.threads, options.mip_rel_gap = 1, 0.0  # these programs are too small to share; no gap may be left
    return options
