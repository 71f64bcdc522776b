"""Search for the best schedule of a task graph within a budget, with a lower bound."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace

from pipeloom.errors import InfeasibleError, InputError, NothingFoundError
from pipeloom.limits import MAX_THREADS
from pipeloom.search.alternate import alternate
from pipeloom.search.budget import WHOLE, Budget
from pipeloom.search.context import Context
from pipeloom.search.exhaustive import schedule_of_last_resort
from pipeloom.search.fitting import fitting_ways
from pipeloom.search.methods import Method, find_method
from pipeloom.search.params import DEFAULTS, SearchParams
from pipeloom.search.plain import minimum_memory
from pipeloom.search.restricted import RestrictedGraph
from pipeloom.search.result import MoveCount, Progress, Solution
from pipeloom.search.state import Search
from pipeloom.taskgraph import TaskGraph
from pipeloom.timeline import LowerBound, Schedule, check, lower_bound, require_feasible, simulate, within_limits


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
        The method is unknown, or the number of threads is invalid.
    InfeasibleError
        It is proved that no schedule fits. The message names a pair, its rank and the bytes.
    NothingFoundError
        No schedule that fits was found, but this is not proved.
    """
    find_method(method)
    if not 0 <= threads <= MAX_THREADS:
        problem = "is negative" if threads < 0 else f"is above {MAX_THREADS}"
        raise InputError("threads", f"{threads} {problem}", "use 0 for half of the cores")
    threads = threads or max(1, (os.cpu_count() or 2) // 2)

    meter = budget.start()
    meter.reserve(graph.num_tasks)
    moves: dict[str, MoveCount] = {}

    def attempt(graph: TaskGraph) -> Solution:
        context = Context(meter, lower_bound(graph), seed, method, threads, params, on_progress, moves)
        return _solve(graph, context)

    try:
        found = attempt(graph)
    except InfeasibleError as error:
        best = _other_schedule(graph, error, attempt)
        timeline = simulate(graph, best)
        found = Solution(best, timeline, lower_bound(graph), max(1, meter.used), meter.elapsed_s(), best.method, moves)
    require_feasible(graph, found.schedule, found.timeline)
    return found


def _other_schedule(graph: TaskGraph, failure: InfeasibleError, attempt: Callable[[TaskGraph], Solution]) -> Schedule:
    """Return a schedule for which the candidates of some pairs are restricted, or the one of last resort."""
    for other, known in _others(graph):
        best = None
        with suppress(InfeasibleError):
            best = other.schedule(attempt(other.graph).schedule)
        if best is None or not _fits(graph, best):
            best = known
        if best is not None:
            return best
    return schedule_of_last_resort(graph, failure)


def _others(graph: TaskGraph) -> Iterator[tuple[RestrictedGraph, Schedule | None]]:
    """Yield other candidates that may fit if the minimum-memory candidates do not fit together.

    Each comes with a schedule that fits, if one is known.
    """
    if graph.candidates is None:
        return
    if graph.limits_offload and graph.capacity_bytes is not None:
        # Minimum-memory candidates do not use the host. Offloading may fit if every rank reserves staging memory.
        left = graph.capacity_bytes if graph.staging_bytes is None else graph.capacity_bytes - graph.staging_bytes
        staged = replace(graph, capacity_bytes=left, host_capacity_bytes=None, staging_bytes=None)
        yield RestrictedGraph(staged, tuple(tuple(range(len(row))) for row in graph.candidates)), None
    # In these graphs, the candidates that fit together are the minimum-memory ones.
    yield from fitting_ways(graph)


def _fits(graph: TaskGraph, schedule: Schedule) -> bool:
    """Return whether a schedule satisfies the limits, ignoring bytes held by tasks without duration."""
    return within_limits(graph, schedule, simulate(graph, schedule)) or not check(graph, schedule)


def _solve(graph: TaskGraph, context: Context) -> Solution:
    meter, bound, how, exact = context.meter, context.bound, find_method(context.method), context.params.exact
    stretch = WHOLE if how.finish is None else WHOLE.first(exact.start_share)
    if graph.candidates is None or how.every_rollout:
        search = _make_search(graph, context, how)
        with suppress(KeyboardInterrupt):
            how.run(search, stretch)
        best = Schedule(search.orders(), search.candidate, context.method)
        if graph.candidates is not None and (search.candidate is None or not _fits(graph, best)):
            raise NothingFoundError("no order that was tried fits in memory with its strategies")
    else:
        best = alternate(graph, context, how.run, stretch)
    if how.finish is not None and simulate(graph, best).makespan_ns > bound.ns:
        seconds = meter.budget.seconds
        left = exact.seconds if seconds is None else (1 - meter.spent) * seconds
        found = how.finish(
            graph, seconds=left, hint=best, bound_ns=bound.ns, workers=context.threads, seed=context.seed
        )
        best = found.schedule
        if found.bound_ns > bound.ns:
            bound = LowerBound(found.bound_ns, context.method)
    return Solution(best, simulate(graph, best), bound, meter.used, meter.elapsed_s(), context.method, context.moves)


def _make_search(graph: TaskGraph, context: Context, method: Method) -> Search:
    """Make a search under the minimum-memory candidates or the start of the method.

    Any order that fits under other candidates also fits under the minimum-memory ones.
    """
    if graph.candidates is None:
        return Search(graph, context)
    start = None if method.start is None else method.start(graph)
    chosen = graph.with_candidates(minimum_memory(graph) if start is None else start.candidate)
    return Search(chosen, context, chosen_for=graph)
