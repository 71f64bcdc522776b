"""Search for the best schedule of a task graph within a budget, with a lower bound."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from pipeloom.errors import InfeasibleError, InputError, check_seed
from pipeloom.limits import MAX_THREADS
from pipeloom.search.budget import Budget
from pipeloom.search.context import Context
from pipeloom.search.fitting import fitting_way
from pipeloom.search.methods import Method, find_method
from pipeloom.search.params import DEFAULTS, SearchParams
from pipeloom.search.restricted import RestrictedGraph
from pipeloom.search.result import Progress, Solution
from pipeloom.taskgraph import TaskGraph
from pipeloom.timeline import Schedule, check, lower_bound, require_feasible, simulate, within_limits


def solve(
    graph: TaskGraph,
    *,
    budget: Budget,
    seed: int,
    method: str = "default",
    threads: int = 1,
    params: SearchParams = DEFAULTS,
    on_progress: Callable[[Progress], None] | None = None,
) -> Solution:
    """Search for a schedule with a short makespan.

    Parameters
    ----------
    graph : TaskGraph
        Tasks, dependencies, memory limits, and the candidates of every pair.
    budget : Budget
        Limits of time and evaluations. At least one schedule is always tried.
    seed : int
        On one thread, the same seed and number of evaluations give the same result.
    method : str
        Name of a method; see `find_method`.
    threads : int
        Number of threads. 0: half of the cores.
    params : SearchParams
        Parameters of the search.
    on_progress : callable, optional
        Called with a `Progress` after every round of some milliseconds and at every improvement.

    Returns
    -------
    Solution
        The best schedule found, also after Ctrl-C.

    Raises
    ------
    InputError
        The method is unknown, or the seed or the number of threads is invalid.
    InfeasibleError
        It is proved that no schedule fits. The message names a pair, its rank and the bytes.
    NothingFoundError
        No schedule that fits was found, but this is not proved.
    """
    how = find_method(method)
    check_seed("seed", seed)
    if not 0 <= threads <= MAX_THREADS:
        problem = "is negative" if threads < 0 else f"is above {MAX_THREADS}"
        raise InputError("threads", f"{threads} {problem}", "use 0 for half of the cores")
    threads = threads or max(1, (os.cpu_count() or 2) // 2)

    meter = budget.start()
    meter.reserve(graph.num_tasks)
    context = Context(meter, lower_bound(graph), seed, method, threads, params, on_progress)
    try:
        found = how.solve(graph, context)
    except InfeasibleError as error:
        found = context.solution(graph, _other_schedule(graph, error, how, context))
    require_feasible(graph, found.schedule, found.timeline)
    _ = found.gap  # raises if a bound is wrong
    return found


def _other_schedule(graph: TaskGraph, failure: InfeasibleError, how: Method, context: Context) -> Schedule:
    """Search under other candidates if the minimum-memory candidates do not fit together; see `fitting_way`."""

    def under(other: RestrictedGraph) -> Schedule | None:
        with suppress(InfeasibleError):
            found = how.solve(other.graph, replace(context, bound=lower_bound(other.graph)))
            best = other.schedule(found.schedule)
            return best if _fits(graph, best) else None
        return None

    if graph.candidates is not None and graph.limits_offload and graph.capacity_bytes is not None:
        # Minimum-memory candidates do not use the host. Offloading may fit if every rank reserves staging memory.
        left = graph.capacity_bytes if graph.staging_bytes is None else graph.capacity_bytes - graph.staging_bytes
        staged = replace(graph, capacity_bytes=left, host_capacity_bytes=None, staging_bytes=None)
        best = under(RestrictedGraph(staged, tuple(tuple(range(len(row))) for row in graph.candidates)))
        if best is not None:
            return best
    # In this graph, the candidates that fit together are the minimum-memory ones.
    way, known = fitting_way(graph, failure)
    return under(way) or known


def _fits(graph: TaskGraph, schedule: Schedule) -> bool:
    """Return whether a schedule satisfies the limits, ignoring bytes held by tasks without duration."""
    return within_limits(graph, schedule, simulate(graph, schedule)) or not check(graph, schedule)
