"""A microbatch moves beside another in the order of groups."""

from __future__ import annotations

from pipeloom.compiled import callee
from pipeloom.compiled.random import draw
from pipeloom.search.moves.group_order import GroupOrder, draw_microbatches
from pipeloom.search.moves.move import Move


class MoveMicrobatch(Move):
    """Move the groups of one microbatch next to those of another, in both halves of the order."""

    name = "move a microbatch"
    weight = 204

    @staticmethod
    @callee
    def propose(now: GroupOrder) -> None:
        """Put the n-th group of one microbatch before or behind the n-th group of the other."""
        one, other = draw_microbatches(now)
        if one == other:
            return
        order, old, owner = now.order, now.before, now.microbatch
        ahead = draw(now.random) % 2 == 0
        low, high = 0, now.num_forward
        for _half in range(2):
            left = 0
            for i in range(low, high):
                left += owner[old[i]] == other
            # The other microbatch may have no backward to move beside.
            if left > 0:
                at = low
                j = low
                for i in range(low, high):
                    if owner[old[i]] == one:
                        continue
                    meets = owner[old[i]] == other
                    if not (meets and ahead):
                        order[at] = old[i]
                        at += 1
                    if meets:
                        left -= 1
                        # All remaining groups of the microbatch follow the last group of the other.
                        while j < high:
                            if owner[old[j]] == one:
                                order[at] = old[j]
                                at += 1
                                if left > 0:
                                    j += 1
                                    break
                            j += 1
                        if ahead:
                            order[at] = old[i]
                            at += 1
            low, high = high, len(order)
