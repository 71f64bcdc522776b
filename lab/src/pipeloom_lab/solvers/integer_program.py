"""The papers' integer program for memory strategies (DIP §5.3), by HiGHS, to compare with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeloom.search.kernels.strategies import fill_allocated, lay_out, repair
from pipeloom.search.kernels.tables import Options, Work
from pipeloom.search.strategies import Strategies, StrategyChooser, total_ns
from pipeloom.taskgraph import IntArray, TaskGraph
from pipeloom.timeline import Schedule
from pipeloom_lab.solvers import highs

HIGHS_GAP = 0.05
"""As in both papers (DIP §5.3)."""


def program_on_rank(graph: TaskGraph, schedule: Schedule, rank: int) -> Strategies:
    """Return the candidates of one rank's pairs under the schedule's order."""
    return solve_program(state_program(StrategyChooser(graph), schedule.order[rank], rank))


def program_strategies(graph: TaskGraph, schedule: Schedule) -> Schedule:
    """Return the schedule with new candidates; its order must fit with minimum-memory candidates."""
    return Schedule(schedule.order, program_choice(StrategyChooser(graph), schedule.order), schedule.method)


def program_choice(chooser: StrategyChooser, orders: Sequence[IntArray]) -> IntArray:
    """Return the candidate of every pair under the orders of all ranks; a rank without tasks has no program."""
    choice = np.zeros(chooser.graph.num_pairs, np.int64)
    for rank, order in enumerate(orders):
        if len(order):
            found = solve_program(state_program(chooser, order, rank))
            choice[found.pairs] = found.choice
    return choice


def _greedy(options: Options) -> IntArray:
    """Return a start for the program: minimum-memory candidates, then upgrades while memory remains."""
    num_pairs, num_places = len(options.time), len(options.capacity)

    def numbers() -> npt.NDArray[np.float64]:
        return np.zeros(num_pairs)

    work = Work(
        best=options.minimum_memory.copy(),
        trial=np.zeros(num_pairs, np.int64),
        allocated=np.zeros(num_places + 1, np.int64),
        multiplier=np.zeros(num_places + 1),
        running=np.zeros(num_places + 1),
        price=numbers(),
        host_price=numbers(),
        gain=numbers(),
        move=np.zeros(num_pairs, np.int64),
    )
    repair(options, work, work.best)
    found: IntArray = work.best
    return found


@dataclass(frozen=True, slots=True, eq=False)
class StatedProgram:
    """One rank's program, ready to be solved."""

    pairs: IntArray
    """Pairs of the rank."""
    options: Options
    """Times and bytes of their candidates, and what memory is free at every place of the order."""
    greedy: IntArray
    """A choice that fits, to start from."""
    lp: Any


def state_program(chooser: StrategyChooser, order: IntArray, rank: int) -> StatedProgram:
    """Build the program of one rank under its order; minimum-memory candidates must fit."""
    import highspy

    t, d = chooser.tables, chooser.workspace
    mine = slice(int(t.rank_start[rank]), int(t.rank_start[rank + 1]))
    free = d.capacity[: lay_out(t, d, order, rank)].copy()
    options = Options(
        t.time[mine],
        t.activation[mine],
        t.gradient[mine],
        t.minimum_memory[mine],
        d.span[mine].copy(),
        free,
        t.host[mine],
        len(order),
    )
    rank_capacity, span = options.capacity[: options.host_begin], options.span
    num_pairs = len(options.time)
    # Memory only gets tighter where a pair begins to hold or an edge does, so the other places need no row.
    shrinks = np.flatnonzero(np.diff(rank_capacity) < 0) + 1
    rises = np.minimum(span[:, 1] + 1, len(rank_capacity) - 1)
    places = np.unique(np.concatenate([span[:, 0], rises, shrinks]))
    # The host's begin where a pair begins to lie there.
    host_places = np.unique(span[:, 0]) if len(options.capacity) > options.host_begin else places[:0]
    columns, values = _columns(options, places, host_places)
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = options.time.size, num_pairs + len(places) + len(host_places)
    # Milliseconds and shares of the room, so that the solver's tolerances mean something.
    lp.col_cost_ = options.time.ravel() / 1e6
    lp.col_lower_, lp.col_upper_ = np.zeros(lp.num_col_), np.ones(lp.num_col_)
    limits = np.concatenate([rank_capacity[places], options.capacity[options.host_begin + host_places]])
    capacity = np.maximum(limits, 1).astype(np.float64)
    lp.row_lower_ = np.concatenate([np.ones(num_pairs), np.full(len(limits), -highspy.kHighsInf)])
    lp.row_upper_ = np.concatenate([np.ones(num_pairs), np.where(limits > 0, 1.0, 0.0)])
    starts = np.zeros(lp.num_col_ + 1, np.int32)
    np.cumsum([len(rows) for rows in columns], out=starts[1:])
    index = np.concatenate(columns).astype(np.int32)
    value = np.concatenate(values)
    memory_rows = index >= num_pairs
    value[memory_rows] /= capacity[index[memory_rows] - num_pairs]
    lp.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    lp.a_matrix_.start_, lp.a_matrix_.index_, lp.a_matrix_.value_ = starts, index, value
    lp.integrality_ = [highspy.HighsVarType.kInteger] * lp.num_col_
    return StatedProgram(t.pair[mine], options, _greedy(options), lp)


def _columns(
    options: Options, places: IntArray, host_places: IntArray
) -> tuple[list[npt.NDArray[np.int64]], list[npt.NDArray[np.float64]]]:
    """Return rows and amounts of every candidate of every pair: the choice row, then memory, then host memory."""
    activation, gradient, span = options.activation, options.gradient, options.span
    num_pairs, num_options = options.time.shape
    first_host_row = num_pairs + len(places)
    columns: list[npt.NDArray[np.int64]] = []
    values: list[npt.NDArray[np.float64]] = []
    for i in range(num_pairs):
        held = np.searchsorted(places, span[i, 0]), np.searchsorted(places, span[i, 1], "right")
        after = np.searchsorted(places, span[i, 2], "right")
        there = np.searchsorted(host_places, span[i, 0]), np.searchsorted(host_places, span[i, 1], "right")
        rows = np.concatenate([[i], num_pairs + np.arange(held[0], after), first_host_row + np.arange(*there)])
        for j in range(num_options):
            columns.append(rows)
            amounts = np.where(np.arange(held[0], after) < held[1], activation[i, j], gradient[i, j])
            away = np.full(there[1] - there[0], options.host[i, j], np.float64)
            values.append(np.concatenate([[1.0], amounts.astype(np.float64), away]))
    return columns, values


def solve_program(
    stated: StatedProgram, *, gap: float = HIGHS_GAP, warm: bool = True, seconds: float | None = None
) -> Strategies:
    """Solve with HiGHS on one core.

    Parameters
    ----------
    gap : float
        Distance from the solver's bound at which it may stop.
    warm : bool
        Start from the greedy answer.
    seconds : float, optional
        Of the clock, after which it is cut.
    """
    options, greedy, time = stated.options, stated.greedy, stated.options.time
    num_pairs, num_options = time.shape
    start = None
    if warm:
        chosen = np.zeros((num_pairs, num_options))
        chosen[np.arange(num_pairs), greedy] = 1.0
        start = chosen.ravel()
    limit = {} if seconds is None else {"time_limit": max(0.01, seconds)}
    answer = highs.solve(stated.lp, start, mip_rel_gap=gap, threads=1, **limit)
    choice, allocated = greedy, np.zeros(len(options.capacity) + 1, np.int64)
    if len(answer.values) == time.size:
        found: IntArray = answer.values.reshape(num_pairs, num_options).argmax(axis=1)
        fill_allocated(options, found, allocated)
        # The solver's tolerance could let a few bytes too many through.
        if (allocated[:-1] <= options.capacity).all() and total_ns(time, found) < total_ns(time, greedy):
            choice = found
    # Rows of candidates are padded with copies of the base.
    copies = (time == time[:, :1]) & (options.activation == options.activation[:, :1])
    copies &= (options.gradient == options.gradient[:, :1]) & (options.host == options.host[:, :1])
    choice = np.where(copies[np.arange(num_pairs), choice], 0, choice)
    return Strategies(stated.pairs, choice, total_ns(time, choice), answer.bound * 1e6)
