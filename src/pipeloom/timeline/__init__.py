"""Simulate a schedule, check it, compute lower bounds, and attribute bubbles to their causes."""

from pipeloom.timeline.bounds import assignable_bound, bound_of, longest_paths, lower_bound
from pipeloom.timeline.bubbles import Bubbles, bubbles
from pipeloom.timeline.check import Violation, check, require_feasible
from pipeloom.timeline.checkpoints import Checkpoint, checkpoint, resume
from pipeloom.timeline.resolve import Resolved, resolve_candidates
from pipeloom.timeline.schedule import LowerBound, Schedule, Timeline, gap, random_schedule
from pipeloom.timeline.simulate import (
    host_peaks,
    memory_changes,
    memory_curve,
    peaks_with_instants,
    running_order,
    simulate,
    within_limits,
)

__all__ = [
    "Bubbles",
    "Checkpoint",
    "LowerBound",
    "Resolved",
    "Schedule",
    "Timeline",
    "Violation",
    "assignable_bound",
    "bound_of",
    "bubbles",
    "check",
    "checkpoint",
    "gap",
    "host_peaks",
    "longest_paths",
    "lower_bound",
    "memory_changes",
    "memory_curve",
    "peaks_with_instants",
    "random_schedule",
    "require_feasible",
    "resolve_candidates",
    "resume",
    "running_order",
    "simulate",
    "within_limits",
]
