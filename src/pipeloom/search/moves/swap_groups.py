"""Two groups change places."""

from __future__ import annotations

from pipeloom.compiled import callee
from pipeloom.search.moves.group_order import GroupOrder, draw_places
from pipeloom.search.moves.move import Move


class SwapGroups(Move):
    """Exchange two groups of one half of the order."""

    name = "swap groups"
    weight = 32

    @staticmethod
    @callee
    def propose(now: GroupOrder) -> None:
        """Exchange the groups at two places."""
        one, other = draw_places(now)
        now.order[one], now.order[other] = now.before[other], now.before[one]
