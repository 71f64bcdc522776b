"""The whole problem as one mixed integer program: a start time per task, an order bit per two tasks of a rank.

What is held when a task runs follows from the order bits: a pair is held if its F is before the task and its
backward is not. Any solver of linear programs with integers can take it; it is for small graphs without candidates.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from math import ceil, isfinite

import numpy as np
import numpy.typing as npt

from pipeloom.errors import InputError
from pipeloom.taskgraph import IntArray, TaskGraph, topological_order
from pipeloom.timeline import Schedule, longest_paths, memory_changes, simulate
from pipeloom_lab.solvers import highs
from pipeloom_lab.solvers.exact import Exact, finish, unit_of
from pipeloom_lab.solvers.highs import Row

BoolArray = npt.NDArray[np.bool_]
TOLERANCE = 2e-6
"""Of the solvers' bounds, in mean task durations."""


@dataclass(frozen=True, slots=True)
class LinearModel:
    """Minimise the last column, subject to the rows.

    Attributes
    ----------
    low, high : list of float
        Bounds of every column: starts of the tasks, then order bits, then the makespan; times in ``unit_ns``.
    bits : dict
        Column of the bit that is 1 where task a comes before task b, by (a, b); one of every two tasks of a rank
        whose order is open.
    before : array, shape (num_tasks, num_tasks)
        Tasks of one rank whose order is settled: a comes before b.
    unit_ns : float
        Times are in mean task durations, so that they are near one.
    """

    low: list[float]
    high: list[float]
    num_tasks: int
    rows: list[Row]
    bits: dict[tuple[int, int], int]
    before: BoolArray
    unit_ns: float

    def is_integer(self, column: int) -> bool:
        """Return whether a column is an order bit."""
        return self.num_tasks <= column < len(self.low) - 1

    def bound_ns(self, graph: TaskGraph, dual: float) -> int:
        """Return the lower bound of a solver's dual bound, less the solver's tolerance.

        All makespans are multiples of the graph's unit, so the next one is a bound as well. A solver that is cut
        early may have none.
        """
        if not isfinite(dual):
            return 0
        unit = unit_of(graph)
        return max(0, ceil((dual - TOLERANCE) * self.unit_ns / unit) * unit)

    def schedule(self, graph: TaskGraph, values: npt.NDArray[np.float64], method: str) -> Schedule:
        """Return the orders that a solution's bits encode."""
        before = self.before.copy()
        for (a, b), column in self.bits.items():
            before[a, b], before[b, a] = values[column] > 0.5, values[column] <= 0.5
        return Schedule(orders_from_pairs(graph, before), None, method)


def refuse_candidates(graph: TaskGraph, method: str) -> None:
    """Raise `InputError` if the graph has candidates, which these models lack."""
    if graph.candidates is not None:
        raise InputError("method", f"{method} takes no candidates", "use cp-sat, or choose the candidates first")


def settled_orders(graph: TaskGraph, horizon_ns: int) -> BoolArray:
    """``[a, b]``: in every schedule no longer than the horizon, a comes before b on their rank.

    Either a path leads from a to b, or b before a would leave too little time for what comes before and after.
    """
    reach = np.zeros((graph.num_tasks, graph.num_tasks), np.bool_)
    for t in topological_order(graph).tolist():
        for p in graph.predecessor[graph.predecessor_start[t] : graph.predecessor_start[t + 1]].tolist():
            reach[:, t] |= reach[:, p]
            reach[p, t] = True
    head, tail = longest_paths(graph, graph.duration_ns)
    until_end, from_start = head + graph.duration_ns, tail + graph.duration_ns
    too_late = (until_end[None, :] + from_start[:, None] > horizon_ns) & ~reach & ~reach.T
    # Two tasks of which neither can be first would mean a horizon that is too short.
    settled: BoolArray = reach | (too_late & ~too_late.T)
    settled &= graph.rank[:, None] == graph.rank[None, :]
    return settled


def open_pairs(graph: TaskGraph, before: BoolArray) -> Iterator[tuple[int, int]]:
    """Yield two tasks of one rank with open order, the lower number first."""
    for rank in range(graph.num_ranks):
        for a, b in combinations(np.flatnonzero(graph.rank == rank).tolist(), 2):
            if not (before[a, b] or before[b, a]):
                yield a, b


def orders_from_pairs(graph: TaskGraph, before: BoolArray) -> tuple[IntArray, ...]:
    """Return orders per rank from a total order relation."""
    place = before.sum(axis=0)
    orders = []
    for rank in range(graph.num_ranks):
        mine = np.flatnonzero(graph.rank == rank)
        orders.append(mine[np.argsort(place[mine], kind="stable")])
    return tuple(orders)


def memory_rows(graph: TaskGraph) -> Iterator[tuple[int, int, IntArray, IntArray, int]]:
    """Yield the memory constraint of every task at whose start memory could run out.

    Yields
    ------
    task, at_start : int
        The task and the bytes that it takes when it starts.
    others, net : array
        Tasks of its rank that change what is held, and by how much once they have run.
    capacity : int
    """
    room = graph.headroom_bytes
    if room is None:
        return
    at_start, at_end = memory_changes(graph)
    net = at_start + at_end
    for rank in range(graph.num_ranks):
        mine = np.flatnonzero(graph.rank == rank)
        capacity = int(room[rank])
        grows_at_end = bool((at_end[mine] > 0).any())
        for t in mine.tolist():
            if at_start[t] > 0 or grows_at_end:
                others = mine[(mine != t) & (net[mine] != 0)]
                yield t, int(at_start[t]), others, net[others], capacity


def state(graph: TaskGraph, hint: Schedule, bound_ns: int) -> LinearModel:
    """Build the model; no schedule longer than the hint is feasible."""
    horizon = simulate(graph, hint).makespan_ns
    unit = max(1.0, float(graph.duration_ns.mean()))
    head, tail = longest_paths(graph, graph.duration_ns)
    length = graph.duration_ns / unit
    before = settled_orders(graph, horizon)
    low = [float(h) / unit for h in head]
    high = ((horizon - tail - graph.duration_ns) / unit).tolist()
    bits: dict[tuple[int, int], int] = {}
    for a, b in open_pairs(graph, before):
        bits[a, b] = len(low)
        low.append(0.0)
        high.append(1.0)
    last = len(low)
    low.append(bound_ns / unit)
    high.append(horizon / unit)
    rows: list[Row] = []
    for t in range(graph.num_tasks):
        rows.append(([last, t], [1.0, -1.0], float(length[t] + tail[t] / unit)))
        for e in range(graph.successor_start[t], graph.successor_start[t + 1]):
            other = int(graph.successor[e])
            wait = float(length[t] + graph.successor_delay_ns[e] / unit)
            rows.append(([other, t], [1.0, -1.0], wait))
    reached = _by_a_path(graph)
    rows += [([b, a], [1.0, -1.0], float(length[a])) for a, b in np.argwhere(before & ~reached).tolist()]
    for (a, b), bit in bits.items():
        # As tight as the windows of the two allow.
        slack_ab, slack_ba = high[a] + length[a] - low[b], high[b] + length[b] - low[a]
        rows.append(([b, a, bit], [1.0, -1.0, -slack_ab], float(length[a] - slack_ab)))
        rows.append(([a, b, bit], [1.0, -1.0, slack_ba], float(length[b])))
    rows += _memory(graph, bits, before)
    return LinearModel(low, high, graph.num_tasks, rows, bits, before, unit)


def _by_a_path(graph: TaskGraph) -> BoolArray:
    """``[a, b]``: an edge already keeps a before b."""
    direct = np.zeros((graph.num_tasks, graph.num_tasks), np.bool_)
    source = np.repeat(np.arange(graph.num_tasks), np.diff(graph.successor_start))
    direct[source, graph.successor] = True
    return direct


def _memory(graph: TaskGraph, bits: dict[tuple[int, int], int], before: BoolArray) -> Iterator[Row]:
    """Yield rows that keep the held bytes within capacity while each task runs."""
    for task, at_start, others, net, capacity in memory_rows(graph):
        scale = float(max(capacity, 1))
        columns: list[int] = []
        factors: list[float] = []
        # room - held - at_start >= 0, where held sums the others that come before.
        limit = (at_start - capacity) / scale
        for other, change in zip(others.tolist(), net.tolist(), strict=True):
            if (other, task) in bits:
                columns.append(bits[other, task])
                factors.append(-change / scale)
            elif (task, other) in bits:
                columns.append(bits[task, other])
                factors.append(change / scale)
                limit += change / scale
            elif before[other, task]:
                limit += change / scale
        if columns:
            yield columns, factors, limit


HAIR = 1e-7
"""In mean task durations; well within the tolerance that bounds are corrected by."""


def milp(graph: TaskGraph, *, seconds: float, hint: Schedule, bound_ns: int, workers: int = 1, seed: int = 0) -> Exact:
    """Solve with HiGHS; arguments as in `pipeloom_lab.solvers.exact.cp_sat`.

    Raises
    ------
    InputError
        The graph has candidates.
    """
    refuse_candidates(graph, "milp")
    model = state(graph, hint, bound_ns)
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
