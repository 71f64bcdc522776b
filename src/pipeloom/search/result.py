"""Results and progress of a search."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from pipeloom.timeline import LowerBound, Schedule, Timeline, gap


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a running search."""

    elapsed_s: float
    evaluations: int
    best_ns: int
    bound_ns: int

    @property
    def gap(self) -> float:
        """Makespan divided by the lower bound, minus one."""
        return gap(self.best_ns, self.bound_ns)


class Count(NamedTuple):
    """How often a search tried a move or a schedule of a start, and how often it made the schedule shorter."""

    tried: int
    improved: int


@dataclass(frozen=True, slots=True)
class Solution:
    """A schedule with a lower bound.

    Attributes
    ----------
    evaluations : int
        Number of schedules tried.
    elapsed_s : float
        Elapsed time in seconds, by the clock of the budget.
    moves, starts : dict
        Counts of the moves of local search and of the starts, by name.
    """

    schedule: Schedule
    timeline: Timeline
    lower_bound: LowerBound
    evaluations: int
    elapsed_s: float
    method: str
    moves: dict[str, Count] = field(default_factory=dict)
    starts: dict[str, Count] = field(default_factory=dict)

    @property
    def gap(self) -> float:
        """Makespan divided by the lower bound, minus one."""
        return gap(self.timeline.makespan_ns, self.lower_bound.ns, self.lower_bound.name)
