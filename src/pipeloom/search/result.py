"""What a search gives back, and what it says on the way."""

from __future__ import annotations

from dataclasses import dataclass

from pipeloom.timeline import LowerBound, Schedule, Timeline


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
        return self.best_ns / self.bound_ns - 1 if self.bound_ns else 0.0


@dataclass(frozen=True, slots=True)
class Solution:
    """A schedule and how far it can be from the best one.

    Attributes
    ----------
    schedule : Schedule
    timeline : Timeline
    lower_bound : LowerBound
    evaluations : int
        Schedules tried.
    elapsed_s : float
        By the stopping rule's clock.
    method : str
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
        bound = self.lower_bound.ns
        return self.timeline.makespan_ns / bound - 1 if bound else 0.0
