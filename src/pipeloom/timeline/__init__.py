"""Timeline: simulate a schedule, check it, bound it from below, attribute its bubbles."""

from pipeloom.timeline.schedule import LowerBound, Schedule, Timeline

__all__ = ["LowerBound", "Schedule", "Timeline"]
