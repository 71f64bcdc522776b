"""Traces of runs that are not ours: from a profiler's events to tasks, a replay, bubbles by cause, and costs."""
