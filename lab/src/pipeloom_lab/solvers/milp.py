"""The mixed integer program of `pipeloom_lab.solvers.linear` for HiGHS."""

from __future__ import annotations

import numpy as np

from pipeloom.search.methods import Exact
from pipeloom.taskgraph import TaskGraph
from pipeloom.timeline import Schedule
from pipeloom_lab.solvers import highs, linear
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
    model = linear.state(graph, hint, bound_ns)
    # Rows of times give way by a hair: exact ones, which rounding makes a little too strict, let HiGHS cut off optima.
    slack = np.array([HAIR * (min(columns) < model.num_tasks) for columns, _, _ in model.rows])
    integer = [model.is_integer(column) for column in range(len(model.low))]
    lp = highs.program_of_rows(np.array(model.low), np.array(model.high), integer, model.rows, slack)
    answer = highs.solve(
        lp,
        threads=workers,
        random_seed=seed % (1 << 31),
        time_limit=max(0.01, seconds),
        mip_feasibility_tolerance=1e-9,
        mip_rel_gap=0.0,
    )
    found = model.schedule(graph, answer.values, "milp") if answer.feasible else None
    proved_ns = model.bound_ns(graph, answer.bound)
    return finish(graph, hint, found, max(bound_ns, proved_ns), answer.optimal)
