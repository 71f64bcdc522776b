"""What all methods share while they search one graph: the problem, the incumbent, the budget."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from pipeloom.search import kernels
from pipeloom.search.problem import Groups, Problem, make_problem
from pipeloom.search.result import Progress
from pipeloom.search.stopping import Watch
from pipeloom.taskgraph import IntArray, TaskGraph

STEPS_PER_ROUND = 400_000
"""Tasks that a kernel may schedule before it returns to look at the clock: about 10 ms."""


class Search:
    """One graph (its candidates chosen) under search.

    Attributes
    ----------
    best_ns : int
        Makespan of the incumbent.
    sequence : array
        The incumbent's tasks in an order that all ranks can follow.
    order, choice : array
        Group order and choices that gave the incumbent, or the last incumbent that came from a rollout.
    """

    def __init__(
        self, graph: TaskGraph, target_ns: int, watch: Watch, seed: int,
        on_progress: Callable[[Progress], None] | None = None, used: int = 0,
    ) -> None:  # fmt: skip
        self.graph = graph
        self.problem: Problem
        self.groups: Groups
        self.problem, self.groups, self.jobs = make_problem(graph)
        self.scratch = kernels.make_scratch(self.problem)
        self.target_ns = target_ns
        self.watch = watch
        self.random = np.random.default_rng(seed)
        self.on_progress = on_progress
        self.evaluations = used
        self.best_ns = kernels.NEVER
        self.sequence: IntArray = self.jobs.order
        self.order: IntArray = np.arange(len(self.groups.first))
        self.choice: IntArray = np.zeros(4, np.int64)
        self.rule = self._rule()

    def _rule(self) -> int:
        """Memory matters only where everything at once does not fit."""
        return (
            kernels.UNLIMITED
            if (self.problem.need.sum(axis=0) <= self.problem.room).all()
            else kernels.BANKER
        )

    @property
    def done(self) -> bool:
        """Whether the incumbent cannot be improved."""
        return self.best_ns <= self.target_ns

    def round_size(self) -> int:
        """Evaluations for the next kernel call; 0 when the search is over."""
        if self.done:
            return 0
        return self.watch.left(self.evaluations, max(1, STEPS_PER_ROUND // self.graph.num_tasks))

    def try_order(self, order: IntArray, choice: IntArray) -> int:
        """Evaluate one order; keep it if it is the best so far. Return its makespan or a negative code."""
        self.evaluations += 1
        makespan = int(kernels.evaluate(self.problem, self.scratch, order, choice, self.best_ns))
        if 0 <= makespan < self.best_ns:
            self.order, self.choice = order.copy(), choice.copy()
            self.keep(makespan, self.scratch.sequence)
        return makespan

    def adopt(self, makespan: int, order: IntArray, choice: IntArray) -> None:
        """Keep an order that a kernel found to give ``makespan``, if it is the best so far."""
        if makespan < self.best_ns:
            again = int(kernels.evaluate(self.problem, self.scratch, order, choice, kernels.NEVER))
            assert again == makespan, (again, makespan)
            self.order, self.choice = order.copy(), choice.copy()
            self.keep(makespan, self.scratch.sequence)

    def keep(self, makespan: int, sequence: IntArray) -> None:
        """Make a sequence the incumbent and report it."""
        self.best_ns = makespan
        self.sequence = sequence.copy()
        self.report()

    def report(self) -> None:
        """Tell the caller how far the search is."""
        if self.on_progress is not None:
            state = Progress(self.watch.elapsed_s(), self.evaluations, self.best_ns, self.target_ns)
            self.on_progress(state)

    def orders(self) -> tuple[IntArray, ...]:
        """The incumbent as an order per rank."""
        rank = self.graph.rank[self.sequence]
        return tuple(self.sequence[rank == r] for r in range(self.graph.num_ranks))
