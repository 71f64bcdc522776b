"""The settings of one search."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from pipeloom.search.budget import Budget, Meter
from pipeloom.search.params import DEFAULTS, SearchParams
from pipeloom.search.result import Count, Progress, Solution
from pipeloom.taskgraph import TaskGraph
from pipeloom.timeline import LowerBound, Schedule, simulate


@dataclass(frozen=True, slots=True)
class Context:
    """The settings of one search.

    ``meter`` counts the evaluations of all searches; ``moves`` and ``starts`` those of moves and starts, by name.
    """

    meter: Meter
    bound: LowerBound
    seed: int
    method: str = "default"
    threads: int = 1
    params: SearchParams = DEFAULTS
    on_progress: Callable[[Progress], None] | None = None
    moves: dict[str, Count] = field(default_factory=dict)
    starts: dict[str, Count] = field(default_factory=dict)

    def solution(self, graph: TaskGraph, schedule: Schedule) -> Solution:
        """Return the result of the search if it ends with a schedule now."""
        evaluations, seconds = max(1, self.meter.used), self.meter.elapsed_s()
        timeline = simulate(graph, schedule)
        return Solution(schedule, timeline, self.bound, evaluations, seconds, schedule.method, self.moves, self.starts)


def begin(budget: Budget, bound_ns: int = 0, *, threads: int = 1, params: SearchParams = DEFAULTS) -> Context:
    """Start a budget for a call of a single part of the search."""
    return Context(budget.start(), LowerBound(bound_ns, "given"), seed=0, threads=threads, params=params)
