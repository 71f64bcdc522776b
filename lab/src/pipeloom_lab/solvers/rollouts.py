"""Searches that choose memory strategies every time they decode an order, as DIP does (DIP §5.1)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import numpy as np

from pipeloom.errors import NothingFoundError
from pipeloom.interruptible import interruptible
from pipeloom.search import Method, Solution, search_orders
from pipeloom.search.budget import WHOLE
from pipeloom.search.context import Context
from pipeloom.search.kernels import codes
from pipeloom.search.params import DEFAULTS, StrategyParams
from pipeloom.search.plain import minimum_memory
from pipeloom.search.state import Run, Search
from pipeloom.search.strategies import StrategyChooser
from pipeloom.taskgraph import IntArray, TaskGraph
from pipeloom.timeline import Schedule, check
from pipeloom.timeline.options import pair_options
from pipeloom_lab.solvers.kernels.rollout import Scratch, Tasks, choose_all


class RolloutChooser(StrategyChooser):
    """A chooser of strategies for thousands of orders, in few rounds each."""

    def __init__(self, graph: TaskGraph, params: StrategyParams = DEFAULTS.strategies) -> None:
        super().__init__(graph, params)
        options = pair_options(graph)
        parts = np.stack([options.forward_ns, options.backward_ns, options.weight_ns], axis=2)[self.tables.pair]
        predecessors = (graph.predecessor_start, graph.predecessor, graph.predecessor_delay_ns)
        self._tasks = Tasks(graph.rank, graph.duration_ns, *predecessors, parts)
        ranks, tasks = graph.num_ranks, graph.num_tasks
        self._scratch = Scratch(*(np.zeros(shape, np.int64) for shape in ((ranks, tasks), ranks, ranks, tasks, tasks)))

    def another(self) -> RolloutChooser:
        """Return a chooser for another thread."""
        return RolloutChooser(self.graph, self.params)

    def choose(self, sequence: IntArray) -> int:
        """Choose for a topological sequence of all tasks; return the resulting makespan.

        `choice` then returns the chosen candidates. If they exceed a limit of device or host, return `codes.DEADLOCK`.
        This can happen only if the sequence does not fit with the minimum-memory candidates either.
        """
        arguments = self.tables, self.workspace, self._tasks, self._scratch, sequence, self.params.rollout_rounds
        makespan, fits = interruptible(len(sequence), choose_all, *arguments)
        return int(makespan) if fits else self.judged(sequence, int(makespan))

    def judged(self, sequence: IntArray, makespan: int) -> int:
        """Return the makespan, or `codes.DEADLOCK` if the choice does not fit, ignoring bytes held for no time."""
        rank = self.graph.rank[sequence]
        orders = tuple(sequence[rank == r] for r in range(self.graph.num_ranks))
        return codes.DEADLOCK if check(self.graph, Schedule(orders, self.choice())) else makespan

    def choice(self) -> IntArray:
        """Return the chosen candidate of every pair."""
        found = np.empty(self.graph.num_pairs, np.int64)
        found[self.tables.pair] = self.workspace.choice
        return found


class RolloutSearch(Search):
    """The search of a graph with candidates, whose makespans include the choice of strategies for the order.

    Parameters
    ----------
    candidate : sequence of int
        Strategies under which orders are decoded.

    Attributes
    ----------
    candidate : array, shape (num_pairs,), optional
        Strategies of the incumbent.
    """

    def __init__(self, graph: TaskGraph, context: Context, candidate: IntArray) -> None:
        super().__init__(graph.with_candidates(candidate), context)
        self.chooser = RolloutChooser(graph, context.params.strategies)
        self.candidate: IntArray | None = None

    def play(self, order: IntArray, choice: IntArray, bound: int = codes.NEVER) -> int:
        """Return the makespan of an order or a negative code. No order is aborted: its strategies may be faster."""
        del bound
        makespan = super().play(order, choice)
        return makespan if makespan < 0 else self.chooser.choose(self.scratch.sequence)

    def keep(self, makespan: int, sequence: IntArray) -> None:
        """Make a sequence the incumbent, with the strategies last chosen, and report it."""
        self.candidate = self.chooser.choice()
        super().keep(makespan, sequence)


def every_rollout(run: Run, start: Callable[[TaskGraph], Schedule | None] | None = None) -> Method:
    """Return the method that chooses strategies for every order of a search.

    Parameters
    ----------
    start : callable, optional
        Return a schedule with the strategies under which orders are decoded. None: the minimum-memory candidates,
        under which every order fits that fits under others.
    """

    def solve(graph: TaskGraph, context: Context) -> Solution:
        if graph.candidates is None:
            return search_orders(graph, context, run)
        known = None if start is None else start(graph)
        chosen = None if known is None else known.candidate
        search = RolloutSearch(graph, context, minimum_memory(graph) if chosen is None else chosen)
        with suppress(KeyboardInterrupt):
            run(search, WHOLE)
        best = Schedule(search.orders(), search.candidate, context.method)
        if search.candidate is None or check(graph, best):
            raise NothingFoundError("no order that was tried fits in memory with its strategies")
        return context.solution(graph, best)

    return Method(solve)
