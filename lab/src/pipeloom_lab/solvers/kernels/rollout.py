"""Memory strategies and makespan of one order of all tasks, compiled."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy.typing as npt

from pipeloom.compiled import callee, kernel
from pipeloom.compiled.arrays import assign
from pipeloom.search.kernels.strategies import choose_rank
from pipeloom.search.kernels.tables import Tables, Workspace

Array = npt.NDArray[Any]


class Tasks(NamedTuple):
    """The tasks of a graph.

    Attributes
    ----------
    rank, duration : array, shape (num_tasks,)
        Rank; time in ns. The times of the tasks of pairs are those of the chosen candidates.
    predecessor_start, predecessor, delay : array
        Predecessors of all tasks, as in `TaskGraph`.
    parts : array, shape (num_pairs, num_options, 3)
        Times of F, of B or I, and of W, in ns, for the rows of `Tables`.
    """

    rank: Array
    duration: Array
    predecessor_start: Array
    predecessor: Array
    delay: Array
    parts: Array


class Scratch(NamedTuple):
    """Arrays that `choose_all` writes: the order of each rank, its length, the time of the rank; times of all tasks."""

    orders: Array
    counts: Array
    free_at: Array
    duration: Array
    end: Array


@callee
def finish(tables: Tables, workspace: Workspace, tasks: Tasks, s: Scratch, sequence: Array) -> int:
    """Return the makespan of a topological sequence under the choice in ``workspace.choice``."""
    assign(s.duration, tasks.duration)
    for i in range(len(tables.pair)):
        for which in range(3):
            if tables.tasks[i, which] >= 0:
                s.duration[tables.tasks[i, which]] = tasks.parts[i, workspace.choice[i], which]
    for r in range(len(s.free_at)):
        s.free_at[r] = 0
    makespan = 0
    for task in sequence:
        begin = s.free_at[tasks.rank[task]]
        for e in range(tasks.predecessor_start[task], tasks.predecessor_start[task + 1]):
            begin = max(begin, s.end[tasks.predecessor[e]] + tasks.delay[e])
        s.end[task] = begin + s.duration[task]
        s.free_at[tasks.rank[task]] = s.end[task]
        makespan = max(makespan, s.end[task])
    return makespan


@kernel
def choose_all(
    tables: Tables, workspace: Workspace, tasks: Tasks, s: Scratch, sequence: Array, rounds: int
) -> tuple[int, bool]:
    """Choose the strategies of all ranks for a sequence of all tasks; return the makespan and whether they fit."""
    for r in range(len(s.counts)):
        s.counts[r] = 0
    for task in sequence:
        r = tasks.rank[task]
        s.orders[r, s.counts[r]] = task
        s.counts[r] += 1
    fits = True
    for r in range(len(s.counts)):
        if s.counts[r] > 0:
            fits &= choose_rank(tables, workspace, s.orders[r, : s.counts[r]], r, rounds)[1]
    return finish(tables, workspace, tasks, s, sequence), fits
