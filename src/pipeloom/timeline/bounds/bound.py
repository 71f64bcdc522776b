"""What all lower bounds have in common: the base class, and the facts of a graph that they read."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from pipeloom.lazy import lazy_module
from pipeloom.taskgraph import NO_TASK, IntArray, TaskGraph
from pipeloom.timeline.bounds.warm_up import cool_down, warm_up
from pipeloom.timeline.options import Options, pair_options, without_oversized

if TYPE_CHECKING:
    from pipeloom.timeline import kernels
else:
    kernels = lazy_module("pipeloom.timeline.kernels")


class Bound:
    """A lower bound on the makespan of every schedule under every choice of candidates, as a class without instances.

    The proof is in its docstring.
    """

    name: ClassVar[str]

    @classmethod
    def ns(cls, facts: Facts) -> int:
        """Return the bound in nanoseconds; 0 if it says nothing about the graph."""
        raise NotImplementedError


class Facts:
    """What bounds read of a graph. Durations are the least over the candidates of a pair.

    Attributes
    ----------
    options : Options
        Candidates that fit on their rank by themselves.
    least, most : array, shape (num_tasks,)
        Least and largest duration of every task.
    head, tail : array, shape (num_tasks,)
        Longest path of tasks and delays to the start of a task, and from its end to the end of all.
    pair_rank : array, shape (num_pairs,)
        Rank of every pair.
    ranks : list of int
        Ranks that have tasks.
    """

    def __init__(self, graph: TaskGraph) -> None:
        self.graph = graph
        self.options = without_oversized(graph, pair_options(graph))
        self.least, self.most = extreme_durations(graph, self.options)
        self.head, self.tail = longest_paths(graph, self.least)
        self.pair_rank: IntArray = graph.rank[graph.forward_of]
        self.ranks = [rank for rank in range(graph.num_ranks) if (graph.rank == rank).any()]

    @cached_property
    def first_and_last(self) -> dict[int, tuple[int, int]]:
        """Longest path to the first task of every rank, and from the end of its last one."""
        mine = {rank: self.graph.rank == rank for rank in self.ranks}
        return {rank: (int(self.head[its].min()), int(self.tail[its].min())) for rank, its in mine.items()}

    @cached_property
    def ends(self) -> dict[int, int]:
        """Least time before the first task of every rank plus the least time after its last one.

        Both are longest paths or, where larger, idle time that passes over all ranks cause.
        """
        first, last = ({rank: both[i] for rank, both in self.first_and_last.items()} for i in range(2))
        before = warm_up(self.graph, self.least, self.most, first)
        after = cool_down(self.graph, self.least, self.most, last)
        return {rank: before[rank] + after[rank] for rank in self.ranks}


def extreme_durations(graph: TaskGraph, options: Options) -> tuple[IntArray, IntArray]:
    """Return the least and the largest duration of every task over the candidates of its pair."""
    least, most = graph.duration_ns.copy(), graph.duration_ns.copy()
    tables = (
        (graph.forward_of, options.forward_ns),
        (graph.backward_of, options.backward_ns),
        (graph.weight_of, options.weight_ns),
    )
    for tasks, table in tables:
        has = tasks != NO_TASK
        least[tasks[has]] = table[has].min(axis=1)
        most[tasks[has]] = table[has].max(axis=1)
    return least, most


def longest_paths(graph: TaskGraph, duration: IntArray) -> tuple[IntArray, IntArray]:
    """Return the longest path of tasks and delays to the start of every task, and from its end to the end of all."""
    everything = np.arange(graph.num_tasks, dtype=np.int64)
    no_order = np.zeros(1, np.int64)
    both = []
    for before, after in ((graph.predecessors, graph.successors), (graph.successors, graph.predecessors)):
        run = kernels.make_run(np.diff(before.start))
        kernels.retime(everything, no_order, duration, after, run)
        both.append(run.start)
    return both[0], both[1]
