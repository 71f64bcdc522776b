"""HiGHS for the integer programs: build a program from its rows, and solve it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Row = tuple[Sequence[int], Sequence[float], float]
"""Columns, coefficients, and the least value of their sum."""


@dataclass(frozen=True, slots=True, eq=False)
class Solution:
    """Values of the columns, whether HiGHS calls them feasible and optimal, and its dual bound."""

    values: Array
    feasible: bool
    optimal: bool
    bound: float


def program_of_rows(low: Array, high: Array, integer: Sequence[bool], rows: Sequence[Row], slack: Array) -> Any:
    """Build the program that minimizes the last column subject to the rows, each loosened by its slack."""
    import highspy

    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = len(high), len(rows)
    lp.col_cost_ = np.eye(1, lp.num_col_, lp.num_col_ - 1)[0]
    lp.col_lower_, lp.col_upper_ = low, high
    lp.row_lower_ = np.array([limit for _, _, limit in rows]) - slack
    lp.row_upper_ = np.full(lp.num_row_, highspy.kHighsInf)
    starts = np.zeros(lp.num_row_ + 1, np.int32)
    np.cumsum([len(columns) for columns, _, _ in rows], out=starts[1:])
    lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    lp.a_matrix_.start_ = starts
    lp.a_matrix_.index_ = np.array([c for columns, _, _ in rows for c in columns], np.int32)
    lp.a_matrix_.value_ = np.array([f for _, factors, _ in rows for f in factors])
    kinds = highspy.HighsVarType
    lp.integrality_ = [kinds.kInteger if whole else kinds.kContinuous for whole in integer]
    return lp


def solve(lp: Any, start: Array | None = None, **options: object) -> Solution:
    """Solve a program, from a start if there is one; ``options`` are those of HiGHS."""
    import highspy

    solver: Any = highspy.Highs()  # type: ignore[no-untyped-call]
    for name, setting in ({"output_flag": False} | options).items():
        solver.setOptionValue(name, setting)
    solver.passModel(lp)
    if start is not None:
        known = highspy.HighsSolution()
        known.col_value = start.tolist()
        solver.setSolution(known)
    solver.run()
    info, values = solver.getInfo(), np.array(solver.getSolution().col_value)
    feasible = len(values) == lp.num_col_ and info.primal_solution_status == 2
    optimal = solver.getModelStatus() == highspy.HighsModelStatus.kOptimal
    return Solution(values, bool(feasible), bool(optimal), float(info.mip_dual_bound))
