"""Graphs with candidates: orders and memory strategies by turns, after a choice of which backwards to split."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from pipeloom.errors import InfeasibleError
from pipeloom.search import kernels
from pipeloom.search.jobs import Walks, make_walks
from pipeloom.search.levels import downhill, levels_by_time
from pipeloom.search.local import portfolio
from pipeloom.search.plain import leanest
from pipeloom.search.result import Progress
from pipeloom.search.splitting import Restricted, by_lateness, restrict, split_counts, splittable
from pipeloom.search.state import Search
from pipeloom.search.stopping import Watch
from pipeloom.search.strategies import choose_strategies
from pipeloom.search.tuning import Tuning
from pipeloom.taskgraph import IntArray, TaskGraph
from pipeloom.timeline import LowerBound, Schedule, lower_bound, simulate

Method = Callable[[Search, int, float], None]
"""Searches with so many threads until so much of the budget is spent."""

ROUNDS, LEVEL_ROUNDS, TUNED_ROUNDS = 6, 3, 2
"""Turns of order search and strategy choice: from the leanest candidates, from the best uniform setting, and from
strategies chosen for a lean order."""
PROBE = 0.05
"""Part of the budget for the static orders of one uniform setting."""
FAR = 1.05
"""Makespan over bound beyond which an order for the leanest candidates is tried beside that for a uniform setting."""
SPLIT_SHARE = 0.25
"""Part of the budget in which another number of split microbatches is begun."""


def alternate(
    graph: TaskGraph, bound: LowerBound, run: Method, watch: Watch, seed: int, method: str, threads: int, part: float,
    on_progress: Callable[[Progress], None] | None,
) -> tuple[Schedule, int]:  # fmt: skip
    """Search orders and choose strategies by turns.

    Where pairs can run their backwards whole or split, how many microbatches are split is settled first, by the
    static orders alone.

    Returns
    -------
    Schedule
        The best found.
    int
        Evaluations used.
    """
    best, best_ns, used = Schedule((), None), kernels.NEVER, 0
    chosen = restrict(graph, np.zeros(graph.num_pairs, np.bool_)) if splittable(graph).any() else None
    if chosen is not None:
        best, best_ns, chosen, used = _split(graph, chosen, bound, watch, seed, method, part, on_progress)
    inner = graph if chosen is None else chosen.graph
    found, used = _turns(inner, bound, run, watch, seed, method, threads, part, on_progress, used)
    if chosen is not None:
        found = chosen.schedule(found)
    return (found if simulate(graph, found).makespan_ns <= best_ns else best), used


def _split(
    graph: TaskGraph, whole: Restricted, bound: LowerBound, watch: Watch, seed: int, method: str, part: float,
    on_progress: Callable[[Progress], None] | None,
) -> tuple[Schedule, int, Restricted, int]:  # fmt: skip
    """Try to split none, then the last few, then more of the microbatches, and keep what static orders do best with."""
    can = splittable(graph)
    best, best_ns, chosen, used = Schedule((), None), kernels.NEVER, whole, 0
    lateness: IntArray | None = None
    for count in split_counts(graph):
        if best_ns < kernels.NEVER and watch.share(used) >= SPLIT_SHARE * part:
            break
        restricted = whole if lateness is None else restrict(graph, can & (lateness < count))
        lean = np.array(leanest(restricted.graph), np.int64)
        try:
            search = Search(restricted.graph.with_candidates(lean), bound.ns, watch, seed, on_progress, used)
        except InfeasibleError:
            # What a split backward holds between its halves may not fit where whole ones do.
            if lateness is None:
                raise
            break
        interrupted = True
        with suppress(KeyboardInterrupt):
            portfolio(search)
            interrupted = False
        used = search.evaluations
        inner = Schedule(search.orders(), lean, method)
        tuned = restricted.schedule(choose_strategies(restricted.graph, inner))
        for schedule in (tuned, restricted.schedule(inner)):
            makespan = simulate(graph, schedule).makespan_ns
            if makespan < best_ns:
                best, best_ns, chosen = schedule, makespan, restricted
        if lateness is None:
            lateness = by_lateness(graph, simulate(graph, best))
        if interrupted or best_ns <= bound.ns:
            break
    return best, best_ns, chosen, used


def _turns(
    graph: TaskGraph, bound: LowerBound, run: Method, watch: Watch, seed: int, method: str, threads: int, part: float,
    on_progress: Callable[[Progress], None] | None, used: int,
) -> tuple[Schedule, int]:  # fmt: skip
    """First orders under one setting for all pairs, then the strategies that the order leaves room for, then orders
    under those, and so on.

    The papers start from the leanest candidates (`dip.txt` §5.2). Where memory is limited the start is the setting
    that static orders do best with. If that is far from the bound, memory is so tight that settings must differ from
    pair to pair: then an order made for the leanest, whose room the choice of strategies fills, is often better.
    """

    def told(progress: Progress) -> None:
        if on_progress is not None:
            on_progress(replace(progress, bound_ns=bound.ns))

    walks, tuning = None if graph.capacity_bytes is None else make_walks(graph), Tuning(graph, watch)
    start, probe, used = _start(graph, bound, watch, seed, on_progress, used, walks)
    lean: IntArray = np.array(leanest(graph), np.int64)
    incumbent = _Incumbent(graph, method, Schedule((), lean))
    choice, rounds = (lean, ROUNDS) if start is None else (start, LEVEL_ROUNDS)
    previous: Search | None = None
    if start is not None and probe is not None and probe.best_ns > FAR * bound.ns:
        leanly = Search(graph.with_candidates(lean), bound.ns, watch, seed, told, used, walks=walks)
        portfolio(leanly, until=watch.share(used) + PROBE)
        used = probe.evaluations = leanly.evaluations
        under_start = incumbent.offer(probe, start, tuning)
        under_lean = incumbent.offer(leanly, lean, tuning)
        if under_lean.ns < under_start.ns:
            choice, previous, probe, rounds = under_lean.candidate, leanly, None, TUNED_ROUNDS
        rounds = min(rounds, tuning.turns(part - watch.share(used)))
    begin = watch.share(used)
    for turn in range(rounds):
        chosen = graph.with_candidates(choice)
        # How far an order is from the optimum, and whether to go on, is a matter of these strategies.
        target = max(bound.ns, lower_bound(chosen).ns)
        if turn == 0 and probe is not None:
            # The static orders that chose the setting are a part of its search.
            search = probe.resumed(target, told)
        else:
            search = Search(chosen, target, watch, seed + turn, told, used, walks=walks)
        turn_is_last = True
        until = begin + (part - begin) * (turn + 1) / rounds - tuning.share
        with suppress(KeyboardInterrupt):
            if previous is not None:
                search.try_like(previous)
            run(search, threads, until)
            turn_is_last = watch.left(search.evaluations, 1) == 0
        used, previous = search.evaluations, search
        choice = incumbent.offer(search, choice, tuning).candidate
        if turn_is_last or incumbent.ns <= bound.ns:
            break
    return incumbent.best, used


class _Offered(NamedTuple):
    """What the strategies chosen for an order give."""

    ns: int
    candidate: IntArray


class _Incumbent:
    """The best schedule so far, with its strategies."""

    def __init__(self, graph: TaskGraph, method: str, nothing: Schedule) -> None:
        self.graph, self.method = graph, method
        self.best, self.ns = nothing, kernels.NEVER

    def offer(self, search: Search, choice: IntArray, tuning: Tuning) -> _Offered:
        """Take a search's order as it is, or with strategies chosen for it; return the latter."""
        found = Schedule(search.orders(), choice, self.method)
        tuned = tuning.choose(found)
        makespans = [simulate(self.graph, schedule).makespan_ns for schedule in (found, tuned)]
        for makespan, schedule in zip(makespans, (found, tuned), strict=True):
            if makespan < self.ns:
                self.best, self.ns = schedule, makespan
        return _Offered(makespans[1], choice if tuned.candidate is None else tuned.candidate)


def _start(
    graph: TaskGraph, bound: LowerBound, watch: Watch, seed: int, on_progress: Callable[[Progress], None] | None,
    used: int, walks: Walks | None,
) -> tuple[IntArray | None, Search | None, int]:  # fmt: skip
    """The uniform setting with the best static orders, their search, and the evaluations used.

    None: no limit, or no setting fits.
    """
    if graph.capacity_bytes is None:
        return None, None, used
    searches: dict[int, Search] = {}

    def makespan(level: int) -> float:
        nonlocal used
        try:
            chosen = graph.with_candidates(np.full(graph.num_pairs, level))
            # A setting that fits in some odd order only is not worth the seconds that finding it takes.
            search = Search(chosen, bound.ns, watch, seed, on_progress, used, walks=walks, thorough=False)
        except InfeasibleError:
            return float("inf")
        portfolio(search, until=watch.share(used) + PROBE)
        used, searches[level] = search.evaluations, search
        return float(search.best_ns)

    level = downhill(levels_by_time(graph), makespan)
    if level is None:
        return None, None, used
    searches[level].evaluations = used
    return np.full(graph.num_pairs, level, np.int64), searches[level], used
