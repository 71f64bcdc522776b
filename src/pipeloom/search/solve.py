"""TaskGraph -> Solution: the best schedule found within a budget, and its distance from the optimum."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import numpy as np

from pipeloom.errors import InfeasibleError, InputError
from pipeloom.search import kernels
from pipeloom.search.alternate import Method, alternate
from pipeloom.search.exact import Exact, cp_sat
from pipeloom.search.explore import depth_first, random_search, worst
from pipeloom.search.families import family, generate
from pipeloom.search.fitting import fitting_candidates
from pipeloom.search.gurobi import gurobi
from pipeloom.search.justify import can_be_reversed, justify
from pipeloom.search.local import local_search, portfolio
from pipeloom.search.milp import milp
from pipeloom.search.plain import first_in_first_out, leanest
from pipeloom.search.polish import polish, rearrange
from pipeloom.search.result import Progress, Solution
from pipeloom.search.smt import z3
from pipeloom.search.state import Search
from pipeloom.search.stopping import Evaluations, StoppingRule, Watch
from pipeloom.search.tree import mcts_priority, mcts_sequence
from pipeloom.search.uniform import uniform_start
from pipeloom.search.windows import search_windows
from pipeloom.taskgraph import Candidate, TaskGraph
from pipeloom.timeline import LowerBound, Schedule, lower_bound, simulate

HEAT, POLISH_HEAT = 0.1, 0.06
"""Start of the annealing, and of the polish, in mean durations of a task."""
FAR, FAR_SHARE = 1.05, 0.7
"""Above so many times the bound, so much of the time goes to group orders before the justification."""
FEW_CHANGES, MOST_HEAT = 25, 1.0
"""Of group orders: the heat is `HEAT` for so many changes per job or fewer, rises with the root of their number, and
ends at the second. Changes are counted at the speed of the portfolio, which is two to five times slower."""
SMALL, SMALL_SHARE, SMALL_TURNS, SMALL_HEAT = 200, 0.1, 4, 1.0
"""Tasks up to which a graph is small, the part of the time for its local search, then annealings and their start."""

WINDOWS_BEGIN = 0.5
"""Part of the time after which the method ``windows`` turns to windows."""


PORTFOLIO_PART = 0.25
"""Part of the budget that large graphs may spend on static heuristics, of which the promising ones come early."""


def _default(search: Search, threads: int, until: float) -> None:
    """Portfolio; then, where memory is tight, annealing of orders and justification, else local search to the end.

    Small graphs get several annealings on the list of tasks instead, each from the incumbent.
    """
    first = search.watch.share(search.evaluations)
    began_s, used = search.watch.elapsed_s(), search.evaluations
    portfolio(search, first + PORTFOLIO_PART * (until - first))
    first = search.watch.share(search.evaluations)
    took_s, used = search.watch.elapsed_s() - began_s, search.evaluations - used
    tight = search.rule != kernels.UNLIMITED
    if search.graph.num_tasks <= SMALL:
        begin = first + SMALL_SHARE * (until - first)
        local_search(search, HEAT, threads, until=begin, since=first)
        for turn in range(SMALL_TURNS):
            end = begin + (until - begin) / (SMALL_TURNS - turn)
            rearrange(search, SMALL_HEAT, until=end, since=begin)
            begin = end
        return
    if not tight:
        local_search(search, threads=threads, until=until, since=first)
        return
    # Far from the bound, microbatches must change places, at which the search of group orders is better.
    far = search.best_ns > FAR * search.target_ns
    middle = first + (FAR_SHARE if far else 0.0) * (until - first)
    if far:
        changes = search.watch.expected(used, took_s, middle - first)
        heat = order_heat(changes / len(search.problem.job_size))
        local_search(search, heat, threads, until=middle, since=first)
    if not justify(search, HEAT, threads, until=until, since=middle):
        last = middle + 0.7 * (until - middle)
        local_search(search, HEAT, threads, until=last, since=middle)
        polish(search, POLISH_HEAT, until=until, since=last)


def order_heat(changes_per_job: float) -> float:
    """Start of the annealing of group orders, in mean durations of a task: the longer it may last, the hotter."""
    return float(min(MOST_HEAT, HEAT * max(1.0, changes_per_job / FEW_CHANGES) ** 0.5))


def _portfolio(search: Search, _threads: int, _until: float) -> None:
    portfolio(search)


def _local(search: Search, threads: int, until: float) -> None:
    portfolio(search)
    local_search(search, threads=threads, until=until)


def _annealing(search: Search, threads: int, until: float) -> None:
    portfolio(search)
    local_search(search, HEAT, threads, until=until)


def _windows(search: Search, threads: int, until: float) -> None:
    """The default for a part of the time, then windows; only where memory is tight, for elsewhere they win nothing."""
    first = search.watch.share(search.evaluations)
    tight = search.rule != kernels.UNLIMITED
    _default(search, threads, first + (WINDOWS_BEGIN if tight else 1.0) * (until - first))
    search_windows(search, until)


METHODS: dict[str, Method] = {
    "default": _default,
    "portfolio": _portfolio,
    "local search": _local,
    "annealing": _annealing,
    "windows": _windows,
    "mcts": mcts_sequence,
    "mcts priority": mcts_priority,
    "mcts uniform": mcts_sequence,
    "depth first": depth_first,
    "random": random_search,
    "worst": worst,
}
"""Names that `solve` knows, besides the exact solvers in `EXACT`."""

EVERY_ROLLOUT = ("mcts", "mcts priority", "mcts uniform", "depth first", "random", "worst")
"""Methods that choose strategies in every rollout (`dip.txt` §5.1), not by turns with the search of orders."""
FROM_UNIFORM = "mcts uniform"
"""DIP's tree search with orders made for the best uniform setting, not for the leanest strategies as published."""

EXACT: dict[str, Callable[..., Exact]] = {"cp-sat": cp_sat, "milp": milp, "gurobi": gurobi, "z3": z3}
EXACT_START = 0.1
"""Part of the budget that goes to the default method, whose answer the exact solvers start from."""
EXACT_SECONDS = 10.0
"""Time for an exact solver where the budget has no deadline."""


def solve(
    graph: TaskGraph,
    *,
    budget: StoppingRule,
    seed: int,
    method: str = "default",
    threads: int = 1,
    on_progress: Callable[[Progress], None] | None = None,
) -> Solution:
    """Search for a schedule with a short makespan.

    Parameters
    ----------
    graph : TaskGraph
    budget : StoppingRule
        `Deadline`, `Evaluations` or `Both`. At least one schedule is always made.
    seed : int
        The same seed and number of evaluations give the same answer on one thread.
    method : str
        A name in `METHODS` or `EXACT`.
    threads : int
        1 to the number of cores; 0: half of the cores.
    on_progress : callable, optional
        Called with a `Progress` after every round of some milliseconds, and at every better schedule.

    Returns
    -------
    Solution
        The best schedule found; also after Ctrl-C.

    Raises
    ------
    InputError
        No such method, or a bad number of threads.
    InfeasibleError
        A pair cannot fit; the message names it, its rank and the bytes.
    """
    if method not in METHODS and method not in EXACT:
        raise InputError("method", f"{method!r} is none of {', '.join([*METHODS, *EXACT])}")
    if threads < 0:
        raise InputError("threads", f"{threads} is negative", "use 0 for half of the cores")
    threads = threads or max(1, (os.cpu_count() or 2) // 2)
    try:
        return _solve(graph, budget, seed, method, threads, on_progress)
    except InfeasibleError:
        rows = None if graph.candidates is None else fitting_candidates(graph)
        if graph.candidates is None or rows is None:
            raise
    # The leanest candidates of all pairs do not fit together, but others do. Without those that are lean in
    # another way, they are the leanest.
    left = tuple(tuple(graph.candidates[pair][i] for i in row) for pair, row in enumerate(rows))
    found = _solve(replace(graph, candidates=left), budget, seed, method, threads, on_progress)
    assert found.schedule.candidate is not None
    picked = np.array(
        [row[i] for row, i in zip(rows, found.schedule.candidate.tolist(), strict=True)], np.int64
    )
    return replace(found, schedule=replace(found.schedule, candidate=picked), lower_bound=lower_bound(graph))


def _solve(
    graph: TaskGraph, budget: StoppingRule, seed: int, method: str, threads: int,
    on_progress: Callable[[Progress], None] | None,
) -> Solution:  # fmt: skip
    watch = budget.start()
    bound = lower_bound(graph)
    exact = EXACT.get(method)
    run = METHODS["default" if exact else method]
    part = EXACT_START if exact else 1.0
    if graph.candidates is None or method in EVERY_ROLLOUT:
        search = _make_search(graph, bound.ns, watch, seed, on_progress, method)
        with suppress(KeyboardInterrupt):
            run(search, threads, part)
        best, used = Schedule(search.orders(), search.candidate, method), search.evaluations
    else:
        best, used = alternate(graph, bound, run, watch, seed, method, threads, part, on_progress)
    if exact and simulate(graph, best).makespan_ns > bound.ns:
        left = (1 - watch.share(used)) * watch.seconds if watch.seconds is not None else EXACT_SECONDS
        found = exact(graph, seconds=left, hint=best, bound_ns=bound.ns, workers=threads, seed=seed)
        best = found.schedule
        if found.bound_ns > bound.ns:
            bound = LowerBound(found.bound_ns, method)
    return Solution(best, simulate(graph, best), bound, used, watch.elapsed_s(), method)


def _make_search(
    graph: TaskGraph, target_ns: int, watch: Watch, seed: int, on_progress: Callable[[Progress], None] | None,
    method: str,
) -> Search:  # fmt: skip
    """Orders are searched under the leanest candidates, or a uniform setting, and get strategies at every rollout.

    What fits under a setting fits under the leanest candidates, so the choice of strategies may start from these.
    """
    if graph.candidates is None:
        return Search(graph, target_ns, watch, seed, on_progress)
    start = uniform_start(graph) if method == FROM_UNIFORM else None
    chosen = graph.with_candidates(leanest(graph) if start is None else start.candidate)
    return Search(chosen, target_ns, watch, seed, on_progress, tuned=graph)


def warm_up(method: str = "default", graph: TaskGraph | None = None) -> None:
    """Compile the kernels of a method (once after installing; later calls load them from the cache).

    Parameters
    ----------
    method : str
    graph : TaskGraph, optional
        Only what the search of such a graph calls; else whatever a search may call.
    """
    example = generate(family("uniform", num_ranks=2, num_microbatches=3, memory=1.0), 0)
    simulate(example, first_in_first_out(example))
    lower_bound(example)
    if graph is None or graph.candidates is not None:
        base = Candidate("keep", 2, 4, 0, 2, 2)
        lean = base._replace(strategy="recompute", backward_ns=6, activation_bytes=1)
        chosen = replace(
            example, candidates=((base, lean),) * example.num_pairs, capacity_bytes=example.static_bytes + 4
        )
        for name in ("default", method) if method in EVERY_ROLLOUT else ("default",):
            solve(chosen, budget=Evaluations(40), seed=0, method=name)
    if method in EVERY_ROLLOUT:
        solve(example, budget=Evaluations(20), seed=0, method=method)
        return
    # A target of zero is never reached, so that no kernel is left out.
    search = Search(example, 0, Evaluations(400).start(), 0)
    portfolio(search)
    local_search(search, until=0.6)
    search.try_like(search)
    if graph is None or graph.candidates is not None or graph.capacity_bytes is None:
        # Also where there is a limit: it may not matter under the candidates that are chosen.
        free = Search(replace(example, capacity_bytes=None), 0, Evaluations(60).start(), 0)
        portfolio(free, until=0.5)
        local_search(free)
    if graph is None or graph.capacity_bytes is not None:
        justify(search, HEAT, until=0.7)
    if graph is None or not can_be_reversed(graph):
        polish(search, until=0.8)
    if graph is None or graph.num_tasks <= SMALL:
        rearrange(search, 0.0)
