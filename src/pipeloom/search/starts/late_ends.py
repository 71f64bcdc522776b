"""Orders that delay backwards on which nothing depends."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pipeloom.search.kernels import codes
from pipeloom.search.lists import GroupPriorities
from pipeloom.search.starts.start import Start, halves, sort_groups, stage_of, turns_of
from pipeloom.search.state import Search

_TURNS = ("few small, then large", "large first", "large between", "first in, first out")
"""Sort orders of the microbatches of `LateEnds`."""


class LateEnds(Start):
    """Orders that delay backwards on which nothing depends, if memory does not matter.

    Delayed backwards run when a rank would be idle, or when no other task is left. At the end they keep all ranks busy,
    the longest first, so that little work remains in flight. Only the shortest are delayed, up to a share of all work,
    because the first rank would otherwise run too many of them at the end.
    """

    name = "late ends"

    @classmethod
    def propose(cls, search: Search) -> Iterator[GroupPriorities]:
        """Yield orders for each of the shares ``static_orders.late_parts``."""
        groups = search.groups
        if search.limited or not groups.ends.any():
            return
        forward, backward = halves(search)
        ends = np.flatnonzero(groups.ends)
        ends = ends[np.argsort(groups.tail[ends], kind="stable")]
        # The total work may be 0.
        part = np.cumsum(groups.work[ends]) / max(int(groups.work.sum()), 1)
        turns = turns_of(groups)
        shares = search.params.static_orders.late_parts
        counts = dict.fromkeys(min(len(ends), 1 + int(np.searchsorted(part, share))) for share in shares)
        for name in _TURNS:
            place = turns[name][groups.microbatch]
            for keys in ((place, -stage_of(groups)), (groups.first, place)):
                ahead = sort_groups(forward, keys)
                for count in counts:
                    late = np.zeros(len(groups.first), np.int64)
                    late[ends[:count]] = 1
                    after = np.where(late == 1, -groups.tail, place)
                    urgent = len(backward) - count
                    choice = np.array([codes.ALTERNATE, codes.WEIGHT_LAST, codes.UNLIMITED, 1, urgent], np.int64)
                    for back_keys in ((place, -groups.tail, late), (groups.first, after, late)):
                        order = np.concatenate([ahead, sort_groups(backward, back_keys)])
                        yield GroupPriorities(order, choice)
