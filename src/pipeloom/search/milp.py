"""The whole problem as one mixed integer program for HiGHS: a start time per task, an order bit per two tasks.

What is held when a task runs follows from the order bits: a pair is held if its F is before the task and its
backward is not. For small graphs without candidates.
"""

from __future__ import annotations

import sys
from itertools import combinations
from typing import Any

import numpy as np

from pipeloom.errors import InputError
from pipeloom.search.exact import Exact, orders_of
from pipeloom.taskgraph import TaskGraph, topological_order
from pipeloom.timeline import Schedule, heads_and_tails, memory_changes, simulate


def milp(
    graph: TaskGraph, *, seconds: float, hint: Schedule, bound_ns: int, workers: int = 1, seed: int = 0
) -> Exact:
    """Solve with HiGHS; arguments as in `pipeloom.search.exact.cp_sat`.

    Raises
    ------
    InputError
        The graph has candidates.
    """
    if graph.candidates is not None:
        raise InputError("method", "milp takes no candidates", "use cp-sat, or choose the candidates first")
    if "ortools" in sys.modules:
        raise InputError(
            "method", "milp cannot run in a process that has loaded OR-Tools", "start a new process"
        )
    import highspy

    known = simulate(graph, hint)
    horizon = known.makespan_ns
    # Times in units of the mean task, so that they are near one.
    unit = max(1.0, float(graph.duration_ns.mean()))
    head, tail = heads_and_tails(graph, graph.duration_ns)
    before = _ancestors(graph)
    solver: Any = highspy.Highs()  # type: ignore[no-untyped-call]
    for name, setting in (("output_flag", False), ("threads", workers), ("random_seed", seed % (1 << 31)),
                          ("time_limit", max(0.01, seconds)), ("mip_feasibility_tolerance", 1e-9)):  # fmt: skip
        solver.setOptionValue(name, setting)
    length = graph.duration_ns / unit
    start = [
        solver.addVariable(lb=head[t] / unit, ub=(horizon - tail[t] - graph.duration_ns[t]) / unit)
        for t in range(graph.num_tasks)
    ]
    makespan = solver.addVariable(lb=bound_ns / unit, ub=horizon / unit, obj=1.0)
    for t in range(graph.num_tasks):
        solver.addConstr(makespan >= start[t] + float(length[t] + tail[t] / unit))
        for e in range(graph.successor_start[t], graph.successor_start[t + 1]):
            other = int(graph.successor[e])
            solver.addConstr(start[other] >= start[t] + float(length[t] + graph.successor_delay_ns[e] / unit))
    bits: dict[tuple[int, int], Any] = {}
    big = horizon / unit
    for rank in range(graph.num_ranks):
        mine = np.flatnonzero(graph.rank == rank).tolist()
        for a, b in combinations(mine, 2):
            if before[a, b] or before[b, a]:
                bits[a, b], bits[b, a] = float(before[a, b]), float(before[b, a])
                continue
            x = solver.addBinary()
            bits[a, b], bits[b, a] = x, 1.0 - x
            solver.addConstr(start[b] >= start[a] + float(length[a]) - big * (1.0 - x))
            solver.addConstr(start[a] >= start[b] + float(length[b]) - big * x)
        if graph.capacity_bytes is not None:
            _add_memory(solver, graph, rank, mine, bits)
    solver.run()
    info = solver.getInfo()
    proved = max(bound_ns, int(np.ceil(info.mip_dual_bound * unit * (1 - 1e-9))))
    values = np.array(solver.getSolution().col_value)
    optimal = solver.getModelStatus() == highspy.HighsModelStatus.kOptimal
    if len(values) < graph.num_tasks or info.primal_solution_status != 2:
        return Exact(hint, proved, proved >= known.makespan_ns)
    starts = np.rint(values[: graph.num_tasks] * unit).astype(np.int64)
    schedule = Schedule(orders_of(graph, starts, starts + graph.duration_ns), None, "milp")
    if simulate(graph, schedule).makespan_ns > known.makespan_ns:
        schedule = hint
    return Exact(schedule, min(proved, simulate(graph, schedule).makespan_ns), bool(optimal))


def _ancestors(graph: TaskGraph) -> np.ndarray[tuple[int, int], np.dtype[np.bool_]]:
    """``[a, b]``: a path leads from a to b."""
    reach = np.zeros((graph.num_tasks, graph.num_tasks), np.bool_)
    for t in topological_order(graph).tolist():
        for p in graph.predecessor[graph.predecessor_start[t] : graph.predecessor_start[t + 1]].tolist():
            reach[:, t] |= reach[:, p]
            reach[p, t] = True
    return reach


def _add_memory(
    solver: Any, graph: TaskGraph, rank: int, mine: list[int], bits: dict[tuple[int, int], Any]
) -> None:
    """While each task runs, what tasks before it have left, and what it takes, must fit."""
    assert graph.capacity_bytes is not None
    at_start, at_end = memory_changes(graph)
    net = at_start + at_end
    room = int(graph.capacity_bytes[rank] - graph.static_bytes[rank])
    scale = float(max(room, 1))
    for t in mine:
        held: Any = float(at_start[t]) / scale
        for other in mine:
            if other != t and net[other]:
                held = held + bits[other, t] * (float(net[other]) / scale)
        if not isinstance(held, float):
            solver.addConstr(held <= room / scale)
