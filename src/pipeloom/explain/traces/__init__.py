"""Traces of other trainers: tasks from profiler events, a replay, bubbles by cause, and costs."""
