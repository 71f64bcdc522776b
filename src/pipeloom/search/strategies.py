"""Memory strategies for a fixed order: the fastest candidates that memory allows, rank by rank.

Memory in use depends on a rank's order alone, so each rank is a problem of its own (`dip.txt` §5.3): choose
one candidate per pair, with the least total time, such that nowhere along the rank's order more is held than
the rank has room for. Two ways to solve it: a Lagrangian method that brings its own certificate, and the
papers' integer program by HiGHS.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from pipeloom.search import strategy_kernels
from pipeloom.search.plain import leanest
from pipeloom.taskgraph import NO_TASK, IntArray, TaskGraph
from pipeloom.timeline import Schedule
from pipeloom.timeline.bounds import Options, pair_options

LAGRANGIAN_ROUNDS = 80
HIGHS_GAP = 0.05
"""As in both papers (`dip.txt` §5.3)."""


@dataclass(frozen=True, slots=True)
class Strategies:
    """One rank's choice.

    Attributes
    ----------
    pairs, choice : array
        Pairs of the rank, and the candidate of each.
    total_ns : int
        Time of all their tasks.
    bound_ns : float
        No choice that fits takes less.
    """

    pairs: IntArray
    choice: IntArray
    total_ns: int
    bound_ns: float

    @property
    def gap(self) -> float:
        """Distance from the bound, relative to it."""
        return max(0.0, self.total_ns / self.bound_ns - 1) if self.bound_ns > 0 else 0.0


@dataclass(frozen=True, slots=True)
class _RankProblem:
    pairs: IntArray
    time: IntArray
    activation: IntArray
    gradient: IntArray
    first: IntArray
    last: IntArray
    end: IntArray
    room: IntArray
    lean: IntArray


def choose_strategies(
    graph: TaskGraph, schedule: Schedule, solver: Literal["lagrangian", "highs"] = "lagrangian"
) -> Schedule:
    """The schedule's order with the candidates chosen anew; its order must fit with the leanest ones."""
    choice = np.array(leanest(graph), np.int64)
    options, lean = pair_options(graph), choice.copy()
    for rank in range(graph.num_ranks):
        if len(schedule.order[rank]):
            found = _solve(_rank_problem(graph, options, lean, schedule.order[rank], rank), solver)
            choice[found.pairs] = found.choice
    return Schedule(schedule.order, choice, schedule.method)


def choose_on_rank(
    graph: TaskGraph, schedule: Schedule, rank: int, solver: Literal["lagrangian", "highs"] = "lagrangian"
) -> Strategies:
    """Candidates of one rank's pairs under the order that the schedule gives it."""
    lean = np.array(leanest(graph), np.int64)
    return _solve(_rank_problem(graph, pair_options(graph), lean, schedule.order[rank], rank), solver)


def _solve(problem: _RankProblem, solver: str) -> Strategies:
    if solver == "highs":
        return _by_highs(problem)
    num_pairs, num_places = len(problem.pairs), len(problem.room)
    best, trial = np.zeros(num_pairs, np.int64), np.zeros(num_pairs, np.int64)
    bound = strategy_kernels.lagrangian(
        problem.time, problem.activation, problem.gradient, problem.first, problem.last, problem.end, problem.room,
        problem.lean, LAGRANGIAN_ROUNDS, best, trial, np.zeros(num_places + 1, np.int64), np.zeros(num_places + 1),
        np.zeros(num_places + 1), np.zeros(num_pairs),
    )  # fmt: skip
    return Strategies(problem.pairs, best, _total(problem, best), float(bound))


def _total(problem: _RankProblem, choice: IntArray) -> int:
    return int(problem.time[np.arange(len(choice)), choice].sum())


def _rank_problem(
    graph: TaskGraph, options: Options, lean: IntArray, order: IntArray, rank: int
) -> _RankProblem:
    place = np.full(graph.num_tasks, -1, np.int64)
    place[order] = np.arange(len(order))
    pairs = np.flatnonzero(graph.rank[graph.forward_of] == rank)
    room = np.full(len(order), 1 << 60, np.int64)
    if graph.capacity_bytes is not None:
        room[:] = graph.capacity_bytes[rank] - graph.static_bytes[rank]
    for edge in np.flatnonzero((graph.rank[graph.edge_source] == rank) & (graph.edge_bytes > 0)).tolist():
        held = slice(int(place[graph.edge_source[edge]]) + 1, int(place[graph.edge_target[edge]]) + 1)
        room[held] -= graph.edge_bytes[edge]
    forward, backward, weight = graph.forward_of[pairs], graph.backward_of[pairs], graph.weight_of[pairs]
    first = place[forward]
    last = np.where(backward == NO_TASK, first, place[backward])
    end = np.where(weight == NO_TASK, last, place[weight])
    total = (options.forward_ns + options.backward_ns + options.weight_ns)[pairs]
    gradient = np.where((weight != NO_TASK)[:, None], options.weight_gradient_bytes[pairs], 0)
    return _RankProblem(
        pairs, total, options.activation_bytes[pairs], gradient, first, last, end, room, lean[pairs]
    )


def _by_highs(problem: _RankProblem) -> Strategies:
    """The papers' integer program, started from the greedy answer."""
    import highspy

    num_pairs, num_options = problem.time.shape
    greedy, level = problem.lean.copy(), np.zeros(len(problem.room) + 1, np.int64)
    strategy_kernels.repair(
        greedy, problem.lean, np.zeros(num_pairs), problem.time, problem.activation, problem.gradient, problem.first,
        problem.last, problem.end, problem.room, level, 4 * num_pairs,
    )  # fmt: skip
    # Memory only gets tighter where a pair begins to hold or an edge does, so the other places need no row.
    shrinks = np.flatnonzero(np.diff(problem.room) < 0) + 1
    rises = np.minimum(problem.last + 1, len(problem.room) - 1)
    places = np.unique(np.concatenate([problem.first, rises, shrinks]))
    columns: list[npt.NDArray[np.int64]] = []
    values: list[npt.NDArray[np.float64]] = []
    for i in range(num_pairs):
        held = np.searchsorted(places, problem.first[i]), np.searchsorted(places, problem.last[i], "right")
        after = np.searchsorted(places, problem.end[i], "right")
        rows = np.concatenate([[i], num_pairs + np.arange(held[0], after)])
        for j in range(num_options):
            columns.append(rows)
            amounts = np.where(
                np.arange(held[0], after) < held[1], problem.activation[i, j], problem.gradient[i, j]
            )
            values.append(np.concatenate([[1.0], amounts.astype(np.float64)]))
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = num_pairs * num_options, num_pairs + len(places)
    # Milliseconds and shares of the room, so that the solver's tolerances mean something.
    lp.col_cost_ = problem.time.ravel() / 1e6
    lp.col_lower_, lp.col_upper_ = np.zeros(lp.num_col_), np.ones(lp.num_col_)
    room = np.maximum(problem.room[places], 1).astype(np.float64)
    lp.row_lower_ = np.concatenate([np.ones(num_pairs), np.full(len(places), -highspy.kHighsInf)])
    lp.row_upper_ = np.concatenate([np.ones(num_pairs), np.where(problem.room[places] > 0, 1.0, 0.0)])
    starts = np.zeros(lp.num_col_ + 1, np.int32)
    np.cumsum([len(rows) for rows in columns], out=starts[1:])
    index = np.concatenate(columns).astype(np.int32)
    value = np.concatenate(values)
    memory_rows = index >= num_pairs
    value[memory_rows] /= room[index[memory_rows] - num_pairs]
    lp.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    lp.a_matrix_.start_, lp.a_matrix_.index_, lp.a_matrix_.value_ = starts, index, value
    lp.integrality_ = [highspy.HighsVarType.kInteger] * lp.num_col_
    solver: Any = highspy.Highs()  # type: ignore[no-untyped-call]
    for name, setting in (("output_flag", False), ("mip_rel_gap", HIGHS_GAP), ("threads", 1)):
        solver.setOptionValue(name, setting)
    solver.passModel(lp)
    chosen = np.zeros((num_pairs, num_options))
    chosen[np.arange(num_pairs), greedy] = 1.0
    known = highspy.HighsSolution()
    known.col_value = chosen.ravel().tolist()
    solver.setSolution(known)
    solver.run()
    answer = np.array(solver.getSolution().col_value)
    choice = greedy
    if len(answer) == lp.num_col_:
        found: IntArray = answer.reshape(num_pairs, num_options).argmax(axis=1)
        strategy_kernels.fill_levels(
            found, problem.first, problem.last, problem.end, problem.activation, problem.gradient, level
        )
        # The solver's tolerance could let a few bytes too many through.
        if (level[:-1] <= problem.room).all() and _total(problem, found) < _total(problem, greedy):
            choice = found
    # Rows of candidates are padded with copies of the base.
    copies = (problem.time == problem.time[:, :1]) & (problem.activation == problem.activation[:, :1])
    copies &= problem.gradient == problem.gradient[:, :1]
    choice = np.where(copies[np.arange(num_pairs), choice], 0, choice)
    bound = float(solver.getInfo().mip_dual_bound) * 1e6
    return Strategies(problem.pairs, choice, _total(problem, choice), bound)
