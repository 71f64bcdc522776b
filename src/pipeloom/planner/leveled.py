"""Search from a uniform setting: which strategy, chosen alike for all pairs, gives the best start?

The papers begin with the leanest strategies and let the finished order decide where there is room for faster ones
(`dip.txt` §5.2). An order made for lean pairs holds as many microbatches as fit, and leaves no room: on VLM-L such a
start ends a quarter behind. Here every setting, the same for all pairs, is probed by static orders; the best one's
orders are searched, and only then does every pair get a strategy of its own, and the search goes on under those.
"""

from __future__ import annotations

import numpy as np

from pipeloom.errors import InfeasibleError
from pipeloom.planner.recomputation import levels_by_time
from pipeloom.search import Both, Deadline, Evaluations, Solution, StoppingRule, choose_strategies, solve
from pipeloom.taskgraph import IntArray, TaskGraph
from pipeloom.timeline import Schedule, Timeline, lower_bound, simulate

PROBE, FIRST, SECOND = 0.05, 0.35, 0.35
"""Parts of the budget: for each probe, for the search under the best setting, and for the one after strategies."""

FAR = 1.05
"""Makespan over bound beyond which the search by turns from the leanest strategies is tried as well."""


def solve_from_levels(graph: TaskGraph, *, budget: StoppingRule, seed: int) -> Solution:
    """Search order and strategies, from the best uniform setting.

    Graphs without candidates, without a memory limit or with pairs of unlike choices go to `solve`.

    Raises
    ------
    InfeasibleError
        Nothing fits.
    """
    options = graph.candidates
    if options is None or graph.capacity_bytes is None or len({len(o) for o in options}) != 1:
        return solve(graph, budget=budget, seed=seed)
    bound = lower_bound(graph)
    probes = _probe(graph, levels_by_time(graph), part_of(budget, PROBE), seed)
    if not probes:
        # Says which pair cannot fit.
        return solve(graph, budget=budget, seed=seed)
    used, spent = sum(p.evaluations for p in probes.values()), sum(p.elapsed_s for p in probes.values())
    level = min(probes, key=lambda n: probes[n].timeline.makespan_ns)
    choice: IntArray = np.full(graph.num_pairs, level)
    best: tuple[Schedule, Timeline] | None = None
    for share in (FIRST, SECOND):
        found = solve(graph.with_candidates(choice), budget=part_of(budget, share), seed=seed)
        used, spent = used + found.evaluations, spent + found.elapsed_s
        plain = Schedule(found.schedule.order, choice, "default")
        tuned = choose_strategies(graph, plain)
        for schedule in (plain, tuned):
            timeline = simulate(graph, schedule)
            if best is None or timeline.makespan_ns < best[1].makespan_ns:
                best = schedule, timeline
        if best is None or best[1].makespan_ns <= bound.ns or tuned.candidate is None:
            break
        choice = np.asarray(tuned.candidate, np.int64)
    assert best is not None
    if best[1].makespan_ns > FAR * bound.ns:
        other = solve(graph, budget=part_of(budget, SECOND), seed=seed)
        used, spent = used + other.evaluations, spent + other.elapsed_s
        if other.timeline.makespan_ns < best[1].makespan_ns:
            best = other.schedule, other.timeline
    return Solution(*best, bound, used, spent, "default")


def _probe(graph: TaskGraph, ladder: list[int], budget: StoppingRule, seed: int) -> dict[int, Solution]:
    """Static orders under settings, from the middle of the ladder downhill; by the setting's number."""
    found: dict[int, Solution] = {}
    times: dict[int, float] = {}

    def time_of(place: int) -> float:
        if not 0 <= place < len(ladder):
            return float("inf")
        if place not in times:
            single = graph.with_candidates(np.full(graph.num_pairs, ladder[place]))
            try:
                found[ladder[place]] = solve(single, budget=budget, seed=seed, method="portfolio")
                times[place] = found[ladder[place]].timeline.makespan_ns
            except InfeasibleError:
                times[place] = float("inf")
        return times[place]

    here = len(ladder) // 2
    while time_of(here) == float("inf") and here < len(ladder) - 1:
        here += 1
    while True:
        step = min((here - 1, here + 1), key=time_of)
        if time_of(step) >= time_of(here):
            return found
        here = step


def part_of(budget: StoppingRule, share: float) -> StoppingRule:
    """A part of a budget; at least one evaluation."""
    if isinstance(budget, Deadline):
        return Deadline(budget.seconds * share, budget.clock)
    if isinstance(budget, Evaluations):
        return Evaluations(max(1, round(budget.count * share)))
    if isinstance(budget, Both):
        return Both(
            Deadline(budget.deadline.seconds * share, budget.deadline.clock),
            Evaluations(max(1, round(budget.evaluations.count * share))),
        )
    return budget
