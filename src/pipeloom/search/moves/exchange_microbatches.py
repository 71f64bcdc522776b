"""Two microbatches change places in the order of groups."""

from __future__ import annotations

from pipeloom.compiled import callee
from pipeloom.search.moves.group_order import GroupOrder, draw_microbatches
from pipeloom.search.moves.move import Move


class ExchangeMicrobatches(Move):
    """Exchange all groups of two microbatches, in both halves of the order."""

    name = "exchange microbatches"
    weight = 204

    @staticmethod
    @callee
    def propose(now: GroupOrder) -> None:
        """Give the places of one microbatch to the other, and the reverse."""
        one, other = draw_microbatches(now)
        if one == other:
            return
        low, high = 0, now.num_forward
        for _half in range(2):
            j = low
            for i in range(low, high):
                if now.microbatch[now.before[i]] == one:
                    while j < high and now.microbatch[now.before[j]] != other:
                        j += 1
                    if j == high:
                        break
                    now.order[i], now.order[j] = now.before[j], now.before[i]
                    j += 1
            low, high = high, len(now.order)
