"""What a search gives back, and what it says on the way."""

from __future__ import annotations

from dataclasses import dataclass

from pipeloom.timeline import LowerBound, Schedule, Timeline, gap


@dataclass(frozen=True, slots=True)
class Progress:
    """State of a running search."""

    elapsed_s: float
    evaluations: int
    best_ns: int
    bound_ns: int

    @property
    def gap(self) -> float:
        """Distance from the lower bound, relative to it."""
        return gap(self.best_ns, self.bound_ns)


@dataclass(frozen=True, slots=True)
class Solution:
    """A schedule and how far it can be from the best one.

    Attributes
    ----------
    evaluations : int
        Schedules tried.
    elapsed_s : float
        By the stopping rule's clock.
    """

    schedule: Schedule
    timeline: Timeline
    lower_bound: LowerBound
    evaluations: int
    elapsed_s: float
    method: str

    @property
    def gap(self) -> float:
        """Makespan above the lower bound, relative to it."""
        return gap(self.timeline.makespan_ns, self.lower_bound.ns)
