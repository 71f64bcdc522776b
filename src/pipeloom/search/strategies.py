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
from pipeloom.search.strategy_kernels import Desk, Tables
from pipeloom.taskgraph import NO_TASK, IntArray, TaskGraph
from pipeloom.timeline import Schedule
from pipeloom.timeline.options import pair_options

Solver = Literal["lagrangian", "highs"]
LAGRANGIAN_ROUNDS, ROLLOUT_ROUNDS = 120, 16
"""Rounds where one order is tuned, twice so many once rooms are tightened, and where thousands are."""
MOST_THOROUGH, LARGE_ROUNDS = 900, 60
"""Tasks of a rank beyond which orders are tuned in fewer rounds, without tightened rooms and exchanges: these take
half a second and more for a rank of 1500 tasks, and no search could stop them."""
MOST_SUMS = 4000
"""Different sums of candidates at one place; where there are more, its room is not tightened."""
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


class Tuner:
    """Chooses strategies for orders of one graph again and again, on one thread.

    Parameters
    ----------
    graph : TaskGraph
        With candidates.
    tables : Tables, optional
        Of another tuner of the same graph.
    """

    def __init__(self, graph: TaskGraph, tables: Tables | None = None) -> None:
        self.graph = graph
        self.tables = make_tables(graph) if tables is None else tables
        self._desk = _make_desk(graph)
        self._orders = np.zeros((graph.num_ranks, graph.num_tasks), np.int64)
        self._counts = np.zeros(graph.num_ranks, np.int64)

    def tune(self, sequence: IntArray, rounds: int = LAGRANGIAN_ROUNDS) -> int:
        """Choose for a sequence of all tasks that all ranks can follow; return the makespan that results.

        The sequence must fit with the leanest candidates. `choice` then gives what was chosen.
        """
        return int(
            strategy_kernels.tune(self.tables, self._desk, sequence, self._orders, self._counts, rounds)
        )

    def choice(self) -> IntArray:
        """The chosen candidate of every pair."""
        found = np.empty(self.graph.num_pairs, np.int64)
        found[self.tables.pair] = self._desk.choice
        return found

    @property
    def rounds(self) -> int:
        """Rounds for one order: fewer for a large graph."""
        return (
            LAGRANGIAN_ROUNDS
            if self.graph.num_tasks <= MOST_THOROUGH * self.graph.num_ranks
            else LARGE_ROUNDS
        )

    def on_rank(
        self, order: IntArray, rank: int, solver: Solver = "lagrangian", rounds: int | None = None
    ) -> Strategies:
        """Choose for the pairs of one rank under its order; ``rounds``: of the Lagrangian, `rounds` unless told."""
        t, d = self.tables, self._desk
        rows = slice(int(t.rank_start[rank]), int(t.rank_start[rank + 1]))
        if solver == "highs":
            strategy_kernels.lay_out(t, d, order, rows.start, rows.stop, rank)
            return _by_highs(t, rows, d.span[rows], d.room[: len(order)])
        bound = strategy_kernels.choose_rank(t, d, order, rank, self.rounds if rounds is None else rounds)
        choice = d.choice[rows].copy()
        return Strategies(t.pair[rows], choice, _total(t.time[rows], choice), float(bound))


def choose_strategies(
    graph: TaskGraph, schedule: Schedule, solver: Solver = "lagrangian", tuner: Tuner | None = None,
    rounds: int | None = None,
) -> Schedule:  # fmt: skip
    """The schedule's order with the candidates chosen anew; its order must fit with the leanest ones.

    ``tuner`` is one of this graph, for those who choose more than once; ``rounds`` as in `Tuner.on_rank`.
    """
    tuner = Tuner(graph) if tuner is None else tuner
    choice = np.zeros(graph.num_pairs, np.int64)
    choice[tuner.tables.pair] = tuner.tables.lean
    for rank in range(graph.num_ranks):
        if len(schedule.order[rank]):
            found = tuner.on_rank(schedule.order[rank], rank, solver, rounds)
            choice[found.pairs] = found.choice
    return Schedule(schedule.order, choice, schedule.method)


def choose_on_rank(
    graph: TaskGraph, schedule: Schedule, rank: int, solver: Solver = "lagrangian"
) -> Strategies:
    """Candidates of one rank's pairs under the order that the schedule gives it."""
    return Tuner(graph).on_rank(schedule.order[rank], rank, solver)


def make_tables(graph: TaskGraph) -> Tables:
    """Lay a graph's candidates out for the kernels."""
    options = pair_options(graph)
    home = graph.rank[graph.forward_of]
    pair: IntArray = np.argsort(home, kind="stable")
    parts = np.stack([options.forward_ns, options.backward_ns, options.weight_ns], axis=2)[pair]
    tasks = np.stack([graph.forward_of, graph.backward_of, graph.weight_of], axis=1)[pair]
    gradient = np.where((graph.weight_of != NO_TASK)[:, None], options.weight_gradient_bytes, 0)[pair]
    room = np.full(graph.num_ranks, 1 << 60, np.int64)
    if graph.capacity_bytes is not None:
        room = graph.capacity_bytes - graph.static_bytes
    holding = np.flatnonzero(graph.edge_bytes > 0)
    return Tables(
        pair=pair, rank_start=np.searchsorted(home[pair], np.arange(graph.num_ranks + 1)).astype(np.int64),
        time=parts.sum(axis=2), activation=np.ascontiguousarray(options.activation_bytes[pair]), gradient=gradient,
        parts=parts, lean=np.array(leanest(graph), np.int64)[pair], tasks=tasks, room=room,
        edge_rank=graph.rank[graph.edge_source[holding]], edge_source=graph.edge_source[holding],
        edge_target=graph.edge_target[holding], edge_bytes=graph.edge_bytes[holding], rank=graph.rank,
        duration=graph.duration_ns, predecessor_start=graph.predecessor_start, predecessor=graph.predecessor,
        predecessor_delay=graph.predecessor_delay_ns,
    )  # fmt: skip


def _make_desk(graph: TaskGraph) -> Desk:
    tasks, pairs = graph.num_tasks, graph.num_pairs

    def ints(*shape: int) -> IntArray:
        return np.zeros(shape, np.int64)

    return Desk(
        place=ints(tasks), room=ints(tasks), level=ints(tasks + 1), multiplier=np.zeros(tasks + 1),
        running=np.zeros(tasks + 1), span=ints(pairs, 3), choice=ints(pairs), trial=ints(pairs), price=np.zeros(pairs),
        gain=np.zeros(pairs), move=ints(pairs), spare=ints(9), sums=ints(3, MOST_SUMS), duration=ints(tasks),
        end=ints(tasks), free_at=ints(graph.num_ranks),
    )  # fmt: skip


def _total(time: IntArray, choice: IntArray) -> int:
    return int(time[np.arange(len(choice)), choice].sum())


def _by_highs(tables: Tables, mine: slice, span: IntArray, rank_room: IntArray) -> Strategies:
    """The papers' integer program, started from the greedy answer."""
    import highspy

    time, activation, gradient = tables.time[mine], tables.activation[mine], tables.gradient[mine]
    num_pairs, num_options = time.shape
    greedy, level = tables.lean[mine].copy(), np.zeros(len(rank_room) + 1, np.int64)
    strategy_kernels.repair(
        greedy, tables.lean[mine], np.zeros(num_pairs), time, activation, gradient, span, rank_room, level,
        np.zeros(num_pairs), np.zeros(num_pairs, np.int64),
    )  # fmt: skip
    # Memory only gets tighter where a pair begins to hold or an edge does, so the other places need no row.
    shrinks = np.flatnonzero(np.diff(rank_room) < 0) + 1
    rises = np.minimum(span[:, 1] + 1, len(rank_room) - 1)
    places = np.unique(np.concatenate([span[:, 0], rises, shrinks]))
    columns: list[npt.NDArray[np.int64]] = []
    values: list[npt.NDArray[np.float64]] = []
    for i in range(num_pairs):
        held = np.searchsorted(places, span[i, 0]), np.searchsorted(places, span[i, 1], "right")
        after = np.searchsorted(places, span[i, 2], "right")
        rows = np.concatenate([[i], num_pairs + np.arange(held[0], after)])
        for j in range(num_options):
            columns.append(rows)
            amounts = np.where(np.arange(held[0], after) < held[1], activation[i, j], gradient[i, j])
            values.append(np.concatenate([[1.0], amounts.astype(np.float64)]))
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = num_pairs * num_options, num_pairs + len(places)
    # Milliseconds and shares of the room, so that the solver's tolerances mean something.
    lp.col_cost_ = time.ravel() / 1e6
    lp.col_lower_, lp.col_upper_ = np.zeros(lp.num_col_), np.ones(lp.num_col_)
    room = np.maximum(rank_room[places], 1).astype(np.float64)
    lp.row_lower_ = np.concatenate([np.ones(num_pairs), np.full(len(places), -highspy.kHighsInf)])
    lp.row_upper_ = np.concatenate([np.ones(num_pairs), np.where(rank_room[places] > 0, 1.0, 0.0)])
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
        strategy_kernels.fill_levels(found, span, activation, gradient, level)
        # The solver's tolerance could let a few bytes too many through.
        if (level[:-1] <= rank_room).all() and _total(time, found) < _total(time, greedy):
            choice = found
    # Rows of candidates are padded with copies of the base.
    copies = (time == time[:, :1]) & (activation == activation[:, :1])
    copies &= gradient == gradient[:, :1]
    choice = np.where(copies[np.arange(num_pairs), choice], 0, choice)
    bound = float(solver.getInfo().mip_dual_bound) * 1e6
    return Strategies(tables.pair[mine], choice, _total(time, choice), bound)
