"""Justification: local search that schedules back and forth in time (`pipeloom.search.kernels.shake`)."""

from __future__ import annotations

import numpy as np

from pipeloom.errors import InfeasibleError
from pipeloom.search.kernels.by_rank import make_ranks
from pipeloom.search.kernels.codes import NEVER
from pipeloom.search.kernels.shake import make_table, shake
from pipeloom.search.local import climb_together
from pipeloom.search.polish_kernels import make_desk, retime
from pipeloom.search.problem import Problem, make_problem
from pipeloom.search.state import Search
from pipeloom.taskgraph import BACKWARD, FORWARD, INPUT_GRADIENT, NO_TASK, TaskGraph, make_graph


def can_be_reversed(graph: TaskGraph) -> bool:
    """Whether `reversed_graph` has an answer."""
    return not ((graph.kind >= INPUT_GRADIENT).any() or graph.edge_bytes.any())


def reversed_graph(graph: TaskGraph) -> TaskGraph | None:
    """The graph with time running backwards: a schedule of it, mirrored, is one of the graph.

    A pair's backward becomes its forward, so pairs hold the same bytes meanwhile. None where that does not do:
    backwards that are split hold other bytes at their end, and bytes on edges are held from the end of one task
    to the end of the other.
    """
    if not can_be_reversed(graph):
        return None
    alone = graph.backward_of[graph.pair] == NO_TASK
    return make_graph(
        name=graph.name, num_ranks=graph.num_ranks, module_names=graph.module_names,
        kind=np.where((graph.kind == FORWARD) & ~alone, BACKWARD, FORWARD), rank=graph.rank,
        duration_ns=graph.duration_ns, pair=graph.pair, segment=graph.segment, microbatch=graph.microbatch,
        module=graph.module, activation_bytes=graph.activation_bytes,
        weight_gradient_bytes=graph.weight_gradient_bytes, edge_source=graph.edge_target,
        edge_target=graph.edge_source, edge_delay_ns=graph.edge_delay_ns, static_bytes=graph.static_bytes,
        capacity_bytes=graph.capacity_bytes,
    )  # fmt: skip


class _Shaker:
    """One thread's justification."""

    def __init__(self, search: Search, reverse: Problem, seed: int) -> None:
        self.reverse = reverse
        self.ranks, self.mirror = make_ranks(search.problem), make_ranks(reverse)
        self.random = np.array([seed | 1], np.uint64)
        self.span = float(search.problem.work.max()) / len(search.problem.job_size)
        self.restart(search)

    def restart(self, search: Search) -> None:
        """Go on from the incumbent."""
        desk = make_desk(search.problem, search.sequence)
        makespan = retime(search.problem, desk, NEVER)
        self.table = make_table(desk.order, desk.trial, search.jobs.job_of_task)
        self.state = np.array([makespan, makespan], np.int64)

    def climb(self, search: Search, temperature: float, count: int) -> int:
        """Make about ``count`` passes; return how many were made."""
        return int(
            shake(
                search.problem, self.reverse, self.ranks, self.mirror, self.table, self.state, self.random, self.span,
                temperature, search.target_ns, count,
            )
        )  # fmt: skip

    def offer(self, search: Search) -> None:
        """Make the best schedule the incumbent. Run forwards, its order may be faster than it was backwards."""
        # Any sequence of the best order that respects each rank's order will do for the desk.
        desk = make_desk(search.problem, self.table.best)
        makespan = retime(search.problem, desk, NEVER)
        assert 0 <= makespan <= self.state[1], (makespan, self.state)
        self.state[1] = makespan
        ends = desk.trial + search.problem.task[:-1, 0]
        search.keep(int(makespan), np.lexsort((desk.place, ends, desk.trial)))


def justify(
    search: Search, temperature: float, threads: int = 1, until: float = 1.0, since: float = 0.0
) -> bool:
    """Justify the incumbent until the budget (or its part ``until``) is spent; whether the graph allows it."""
    graph = reversed_graph(search.graph)
    if graph is None:
        return False
    try:
        reverse = make_problem(graph)[0]
    except InfeasibleError:
        # What was tried for a job's order may fail on the reverse alone.
        return False
    seeds = search.random.integers(1, 1 << 62, size=threads)
    climb_together(search, [_Shaker(search, reverse, int(seed)) for seed in seeds], temperature, until, since)
    return True
