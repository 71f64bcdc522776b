"""Lower bounds on the makespan of every schedule of a graph. A bound is one class and one line here."""

from __future__ import annotations

from dataclasses import replace

from pipeloom.taskgraph import Assignable, TaskGraph
from pipeloom.timeline.bounds.assignable import bound_of_any_assignment
from pipeloom.timeline.bounds.bound import Bound, Facts, longest_paths
from pipeloom.timeline.bounds.critical_path import CriticalPath
from pipeloom.timeline.bounds.memory import Memory
from pipeloom.timeline.bounds.rank_work import RankWork
from pipeloom.timeline.check import check
from pipeloom.timeline.schedule import LowerBound, Schedule, Timeline
from pipeloom.timeline.simulate import within_limits

BOUNDS: tuple[type[Bound], ...] = (CriticalPath, RankWork, Memory)

__all__ = ["BOUNDS", "assignable_bound", "bound_of", "longest_paths", "lower_bound"]


def lower_bound(graph: TaskGraph) -> LowerBound:
    """Return the largest lower bound on the makespan of a graph; ``name`` is the bound that binds.

    Parameters
    ----------
    graph : TaskGraph
        Tasks, dependencies and memory limits.
    """
    facts = Facts(graph)
    return max((LowerBound(bound.ns(facts), bound.name) for bound in BOUNDS), key=lambda bound: bound.ns)


def assignable_bound(assignable: Assignable) -> LowerBound:
    """Return a lower bound under every assignment and every choice of candidates.

    Without free pairs, this is `lower_bound`, otherwise `bound_of_any_assignment`.
    """
    return bound_of_any_assignment(assignable) if assignable.free.any() else lower_bound(assignable.graph)


def bound_of(graph: TaskGraph, schedule: Schedule, timeline: Timeline) -> LowerBound:
    """Return the lower bound for a simulated schedule.

    A schedule that exceeds a memory limit may be faster than `lower_bound`, so its bound ignores the limits.
    """
    if not within_limits(graph, schedule, timeline) and check(graph, schedule):
        graph = replace(graph, capacity_bytes=None, host_capacity_bytes=None)
    return lower_bound(graph)
