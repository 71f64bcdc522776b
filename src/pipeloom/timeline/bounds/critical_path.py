"""The longest path of tasks and delays."""

from __future__ import annotations

from pipeloom.timeline.bounds.bound import Bound, Facts


class CriticalPath(Bound):
    """The longest path of tasks and delays: each of its tasks waits for the one before it."""

    name = "critical path"

    @classmethod
    def ns(cls, facts: Facts) -> int:
        """Return the length of the path."""
        return int((facts.head + facts.least + facts.tail).max())
