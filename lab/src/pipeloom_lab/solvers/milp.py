"""The mixed integer program of `pipeloom_lab.solvers.linear` for HiGHS."""

from __future__ import annotations

from typing import Any

import numpy as np

from pipeloom.search.methods import Exact
from pipeloom.taskgraph import TaskGraph
from pipeloom.timeline import Schedule
from pipeloom_lab.solvers import linear
from pipeloom_lab.solvers.exact import finish

HAIR = 1e-7
"""In mean task durations; well within the tolerance that bounds are corrected by."""


def milp(graph: TaskGraph, *, seconds: float, hint: Schedule, bound_ns: int, workers: int = 1, seed: int = 0) -> Exact:
    """Solve with HiGHS; arguments as in `pipeloom_lab.solvers.exact.cp_sat`.

    Raises
    ------
    InputError
        The graph has candidates.
    """
    linear.refuse_candidates(graph, "milp")
    import highspy

    model = linear.state(graph, hint, bound_ns)
    num_columns = len(model.low)
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = num_columns, len(model.rows)
    lp.col_cost_ = np.eye(1, num_columns, num_columns - 1)[0]
    lp.col_lower_, lp.col_upper_ = np.array(model.low), np.array(model.high)
    # Rows of times give way by a hair: exact ones, which rounding makes a little too strict, let HiGHS cut off optima.
    timed = np.array([min(columns) < model.num_tasks for columns, _, _ in model.rows])
    lp.row_lower_ = np.array([limit for _, _, limit in model.rows]) - HAIR * timed
    lp.row_upper_ = np.full(len(model.rows), highspy.kHighsInf)
    starts = np.zeros(len(model.rows) + 1, np.int32)
    np.cumsum([len(columns) for columns, _, _ in model.rows], out=starts[1:])
    lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    lp.a_matrix_.start_ = starts
    lp.a_matrix_.index_ = np.array([c for columns, _, _ in model.rows for c in columns], np.int32)
    lp.a_matrix_.value_ = np.array([f for _, factors, _ in model.rows for f in factors])
    kinds = highspy.HighsVarType
    lp.integrality_ = [kinds.kInteger if model.is_integer(c) else kinds.kContinuous for c in range(num_columns)]
    solver: Any = highspy.Highs()  # type: ignore[no-untyped-call]
    for name, setting in (
        ("output_flag", False),
        ("threads", workers),
        ("random_seed", seed % (1 << 31)),
        ("time_limit", max(0.01, seconds)),
        ("mip_feasibility_tolerance", 1e-9),
        ("mip_rel_gap", 0.0),
    ):
        solver.setOptionValue(name, setting)
    solver.passModel(lp)
    solver.run()
    info = solver.getInfo()
    values = np.array(solver.getSolution().col_value)
    found = None
    if len(values) == num_columns and info.primal_solution_status == 2:
        found = model.schedule(graph, values, "milp")
    proved_ns = model.bound_ns(graph, info.mip_dual_bound)
    optimal = solver.getModelStatus() == highspy.HighsModelStatus.kOptimal
    return finish(graph, hint, found, max(bound_ns, proved_ns), bool(optimal))
