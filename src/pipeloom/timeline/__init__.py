"""Timeline: simulate a schedule, check it, bound it from below, attribute its bubbles."""

from pipeloom.timeline.bounds import heads_and_tails, lower_bound
from pipeloom.timeline.bounds_dealt import dealt_bound
from pipeloom.timeline.bubbles import Bubbles, bubbles
from pipeloom.timeline.check import Violation, check, require_feasible
from pipeloom.timeline.schedule import LowerBound, Schedule, Timeline
from pipeloom.timeline.settle import Settled, settle
from pipeloom.timeline.simulate import memory_changes, memory_curve, running_order, simulate

__all__ = [
    "Bubbles",
    "LowerBound",
    "Schedule",
    "Settled",
    "Timeline",
    "Violation",
    "bubbles",
    "check",
    "dealt_bound",
    "heads_and_tails",
    "lower_bound",
    "memory_changes",
    "memory_curve",
    "require_feasible",
    "running_order",
    "settle",
    "simulate",
]
