"""The mixed integer program of `pipeloom_lab.solvers.linear` for Gurobi.

The licence that comes with the package allows 2000 variables and 2000 constraints; a full one has no limit.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import numpy as np

from pipeloom.errors import InputError
from pipeloom.taskgraph import TaskGraph
from pipeloom.timeline import Schedule
from pipeloom_lab.solvers import linear
from pipeloom_lab.solvers.exact import Exact, finish

TOO_LARGE = 10010
"""Gurobi's code for a model above what its licence allows."""


def gurobi(
    graph: TaskGraph, *, seconds: float, hint: Schedule, bound_ns: int, workers: int = 1, seed: int = 0
) -> Exact:
    """Solve with Gurobi; arguments as in `pipeloom_lab.solvers.exact.cp_sat`.

    Raises
    ------
    InputError
        The graph has candidates; gurobipy is not installed; the model is larger than the licence allows.
    """
    linear.refuse_candidates(graph, "gurobi")
    if find_spec("gurobipy") is None:
        raise InputError("method", "gurobi needs gurobipy, which is not installed", "pip install 'pipeloom-lab[exact]'")
    import gurobipy

    model = linear.state(graph, hint, bound_ns)
    try:
        with gurobipy.Env(empty=True) as environment:
            environment.setParam("OutputFlag", 0)
            environment.start()
            with gurobipy.Model(env=environment) as solver:
                _set(solver, seconds, workers, seed)
                return _solve(graph, hint, bound_ns, model, solver)
    except gurobipy.GurobiError as error:
        if error.errno != TOO_LARGE:
            raise InputError("method", f"gurobi: {error}", "see the licence of gurobipy") from error
        raise InputError(
            "instance",
            f"{graph.name!r} has {len(model.low)} variables and {len(model.rows)} constraints, more than the 2000 of "
            "each that Gurobi's free licence allows",
            "use cp-sat, a smaller instance, or a full licence",
        ) from error


def _set(solver: Any, seconds: float, workers: int, seed: int) -> None:
    for name, setting in (
        ("TimeLimit", max(0.01, seconds)),
        ("Threads", workers),
        ("Seed", seed % 2_000_000_000),
        ("MIPGap", 0.0),
        ("IntFeasTol", 1e-9),
        ("FeasibilityTol", 1e-9),
    ):
        solver.setParam(name, setting)


def _solve(graph: TaskGraph, hint: Schedule, bound_ns: int, model: linear.LinearModel, solver: Any) -> Exact:
    import gurobipy

    columns = [
        solver.addVar(low, high, vtype="B" if model.is_integer(c) else "C")
        for c, (low, high) in enumerate(zip(model.low, model.high, strict=True))
    ]
    for indices, factors, limit in model.rows:
        solver.addConstr(gurobipy.LinExpr(factors, [columns[i] for i in indices]) >= limit)
    solver.setObjective(columns[-1], gurobipy.GRB.MINIMIZE)
    solver.optimize()
    found = None
    if solver.SolCount:
        found = model.schedule(graph, np.array([column.X for column in columns]), "gurobi")
    proved_ns = model.bound_ns(graph, solver.ObjBound)
    return finish(graph, hint, found, max(bound_ns, proved_ns), bool(solver.Status == gurobipy.GRB.Status.OPTIMAL))
