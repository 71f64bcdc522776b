"""Compile the kernels of the search before a budget starts. Later calls load them from the cache."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from pipeloom.search.assignment import compile_assignment_kernels
from pipeloom.search.budget import WHOLE, Budget
from pipeloom.search.context import begin
from pipeloom.search.example import small_pipeline
from pipeloom.search.justify import justify
from pipeloom.search.lists import priorities_of_sequence
from pipeloom.search.local import local_search, portfolio
from pipeloom.search.params import DEFAULTS
from pipeloom.search.plain import first_in_first_out
from pipeloom.search.solve import solve
from pipeloom.search.state import Search
from pipeloom.search.tabu import tabu_search
from pipeloom.taskgraph import Candidate, TaskGraph
from pipeloom.timeline import check, checkpoint, lower_bound, simulate


def compile_kernels(graph: TaskGraph | None = None) -> None:
    """Compile the kernels of the search.

    Parameters
    ----------
    graph : TaskGraph, optional
        Compile only the kernels that a search of this graph calls. None: all kernels.
    """
    chooses, limited = (
        (graph is None or graph.candidates is not None),
        graph is None or graph.capacity_bytes is not None,
    )
    compile_simulation()
    if chooses:
        compile_choices()
    compile_moves()
    # Also for limited memory, which may not matter under the chosen candidates.
    if chooses or not limited:
        compile_moves_without_limit()
    if limited:
        justify(_started(), WHOLE.first(0.7), DEFAULTS.justification.heat)
    if limited or (graph is not None and graph.num_tasks <= DEFAULTS.tabu.most_tasks):
        compile_tabu()


def compile_simulation() -> None:
    """Compile simulator, checker and lower bounds."""
    example = _example()
    schedule = first_in_first_out(example)
    simulate(example, schedule)
    checkpoint(example, schedule)
    check(example, schedule)
    # One microbatch with several sub-microbatches, whose bounds use other kernels.
    lower_bound(replace(example, microbatch=np.zeros_like(example.microbatch)))


def compile_choices() -> None:
    """Compile the search over memory strategies."""
    example, base = _example(), Candidate("keep", 2, 4, 0, 2, 2)
    assert example.static_bytes is not None
    smaller = base._replace(strategy="recompute", backward_ns=6, activation_bytes=1)
    chosen = replace(
        example, candidates=((base, smaller),) * example.num_pairs, capacity_bytes=example.static_bytes + 4
    )
    solve(chosen, budget=Budget(evaluations=40), seed=0)


def compile_moves() -> None:
    """Compile starts and local search with a memory limit."""
    search = _started()
    portfolio(search)
    local_search(search, WHOLE.first(0.6))
    search.try_like(search)
    search.try_rule(priorities_of_sequence(search.graph, search.sequence))


def compile_moves_without_limit() -> None:
    """Compile starts and local search without a memory limit."""
    free = Search(replace(_example(), capacity_bytes=None), begin(Budget(evaluations=60)))
    portfolio(free, WHOLE.first(0.5))
    local_search(free)


def compile_tabu() -> None:
    """Compile the search over orders of tasks."""
    search = _started()
    portfolio(search)
    tabu_search(search)


def compile_rest() -> None:
    """Compile what `compile_kernels` calls after the other steps, and assignment to replicas."""
    compile_assignment_kernels()
    search = _started()
    portfolio(search)
    justify(search, WHOLE.first(0.7), DEFAULTS.justification.heat)


def _example() -> TaskGraph:
    return small_pipeline(num_ranks=2, num_microbatches=3, capacity=True)


def _started() -> Search:
    # A target of 0 is never reached, so that all kernels are called.
    return Search(_example(), begin(Budget(evaluations=400)))
