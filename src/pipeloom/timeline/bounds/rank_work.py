"""The work of one rank between the least times before and after it."""

from __future__ import annotations

from pipeloom.timeline.bounds.bound import Bound, Facts


class RankWork(Bound):
    """On some rank, the least time before its first task, all its work, and the least time after its last task.

    A rank runs one task at a time. `Facts.ends` has the times before and after.
    """

    name = "warm-up + work + cool-down"

    @classmethod
    def ns(cls, facts: Facts) -> int:
        """Return the largest over all ranks."""
        total = facts.options.total_ns
        return max(
            (facts.ends[rank] + int(total[facts.pair_rank == rank].min(axis=1).sum()) for rank in facts.ranks),
            default=0,
        )
