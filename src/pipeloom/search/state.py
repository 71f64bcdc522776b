"""What all methods share while they search one graph: the problem, the incumbent, the budget."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from math import ceil

import numpy as np

from pipeloom.search import kernels
from pipeloom.search.jobs import Walks, memory_matters
from pipeloom.search.portfolio import Start
from pipeloom.search.problem import Groups, Problem, make_problem
from pipeloom.search.result import Progress
from pipeloom.search.scratch import make_scratch
from pipeloom.search.stopping import Watch
from pipeloom.search.strategies import ROLLOUT_ROUNDS, Tuner
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
    tuner : Tuner, optional
        Where strategies are chosen in every rollout: for the graph with the candidates, of which ``graph`` has
        the leanest. Makespans are then those under the chosen ones.
    candidate : array, shape (num_pairs,), optional
        The incumbent's strategies, where there is a tuner.
    starts : iterator, optional
        Static heuristics that are still to be tried, once the first was.
    """

    def __init__(
        self, graph: TaskGraph, target_ns: int, watch: Watch, seed: int,
        on_progress: Callable[[Progress], None] | None = None, used: int = 0, tuned: TaskGraph | None = None,
        walks: Walks | None = None, thorough: bool = True,
    ) -> None:  # fmt: skip
        self.graph = graph
        self.problem: Problem
        self.groups: Groups
        self.problem, self.groups, self.jobs = make_problem(graph, walks, thorough)
        self.scratch = make_scratch(self.problem)
        self.target_ns = target_ns
        self.watch = watch
        self.random = np.random.default_rng(seed)
        self.on_progress = on_progress
        self.evaluations = used
        self.best_ns = kernels.NEVER
        self.sequence: IntArray = self.jobs.order
        self.order: IntArray = np.arange(len(self.groups.first))
        self.choice: IntArray = np.array([0, 0, 0, 1, kernels.ALL_URGENT], np.int64)
        self.rule = kernels.BANKER if memory_matters(graph) else kernels.UNLIMITED
        self.mean_task_ns = float(graph.duration_ns.mean())
        self.tuner = None if tuned is None else Tuner(tuned)
        self.candidate: IntArray | None = None
        self.starts: Iterator[Start] | None = None

    def resumed(self, target_ns: int, on_progress: Callable[[Progress], None] | None) -> Search:
        """The same search, which now ends at another target and reports to another."""
        self.target_ns, self.on_progress = target_ns, on_progress
        return self

    @property
    def done(self) -> bool:
        """Whether the incumbent cannot be improved."""
        return self.best_ns <= self.target_ns

    def round_size(self, until: float = 1.0) -> int:
        """Evaluations for the next kernel call; 0 when the search, or its part ``until``, is over."""
        if self.done:
            return 0
        wanted = max(1, STEPS_PER_ROUND // self.graph.num_tasks)
        if self.watch.evaluations is not None:
            wanted = min(wanted, ceil(until * self.watch.evaluations) - self.evaluations)
        return self.watch.left(self.evaluations, max(0, wanted))

    def play(self, order: IntArray, choice: IntArray, bound: int = kernels.NEVER) -> int:
        """Makespan of an order, or a negative code; one at ``bound`` or above need not be found."""
        bound = kernels.NEVER if self.tuner is not None else bound
        makespan = int(kernels.evaluate(self.problem, self.scratch, order, choice, bound))
        if self.tuner is None or makespan < 0:
            return makespan
        return self.tuner.tune(self.scratch.sequence, ROLLOUT_ROUNDS)

    def try_order(self, order: IntArray, choice: IntArray) -> int:
        """Evaluate one order; keep it if it is the best so far. Return its makespan or a negative code."""
        self.evaluations += 1
        makespan = self.play(order, choice, self.best_ns)
        if 0 <= makespan < self.best_ns:
            self.order, self.choice = order.copy(), choice.copy()
            self.keep(makespan, self.scratch.sequence)
        return makespan

    def try_like(self, other: Search) -> int:
        """Evaluate the order of another search of the same graph under other candidates.

        Groups may differ, since they depend on durations, so the order goes over by segments.
        """
        kernels.expand(other.problem, other.scratch, other.order)
        problem = self.problem
        place = [
            int(other.scratch.position[problem.group_segment[a:b]].min())
            for a, b in pairwise(problem.group_start.tolist())
        ]
        forward, backward = np.split(np.arange(len(place)), [int(problem.num_groups[0])])
        keys = np.array(place)
        order = np.concatenate([forward[np.argsort(keys[forward])], backward[np.argsort(keys[backward])]])
        choice = other.choice.copy()
        choice[2:4] = self.rule, 1
        return self.try_order(order, choice)

    def adopt(self, makespan: int, order: IntArray, choice: IntArray) -> None:
        """Keep an order that a kernel found to give ``makespan``, if it is the best so far."""
        if makespan < self.best_ns:
            again = self.play(order, choice)
            assert again == makespan, (again, makespan)
            self.order, self.choice = order.copy(), choice.copy()
            self.keep(makespan, self.scratch.sequence)

    def keep(self, makespan: int, sequence: IntArray) -> None:
        """Make a sequence the incumbent, with the strategies last chosen, and report it."""
        self.best_ns = makespan
        self.sequence = sequence.copy()
        if self.tuner is not None:
            self.candidate = self.tuner.choice()
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
