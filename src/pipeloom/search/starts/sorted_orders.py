"""Forward groups by microbatch, by round, or with later modules and passes first."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import numpy as np

from pipeloom.search.kernels import codes
from pipeloom.search.lists import GroupPriorities
from pipeloom.search.starts.start import Start, halves, sort_groups, stage_of, turns_of
from pipeloom.search.state import Search
from pipeloom.taskgraph import IntArray


class SortedOrders(Start):
    """Orders of groups by several sort orders of the microbatches.

    Rounds apply if a module passes the ranks more than once. A round has one microbatch per rank and runs pass by pass,
    as in interleaved 1F1B.
    """

    name = "sorted orders"

    @classmethod
    def propose(cls, search: Search) -> Iterator[GroupPriorities]:
        """Yield all orders but that of `FirstInFirstOut`."""
        return islice(_sorted_orders(search), 1, None)


class FirstInFirstOut(Start):
    """The first of the sorted orders."""

    name = "first in, first out"

    @classmethod
    def propose(cls, search: Search) -> Iterator[GroupPriorities]:
        """Yield one order."""
        return islice(_sorted_orders(search), 1)


def _sorted_orders(search: Search) -> Iterator[GroupPriorities]:
    packed, groups = search.packed, search.groups
    forward, backward = halves(search)
    num_ranks = len(packed.capacity)
    several_passes = bool((groups.depth > 0).any())
    splits = packed.class_start[3] > packed.class_start[2]
    weights = (codes.WEIGHT_LAST, codes.WEIGHT_AT_ONCE) if splits else (codes.WEIGHT_LAST,)
    for turn in turns_of(groups).values():
        place = turn[groups.microbatch]
        key_sets: list[tuple[IntArray, ...]] = [(groups.first, place)]
        if several_passes:
            key_sets.append((groups.first, place, groups.depth, place // num_ranks))
        # Begun first. Then a microbatch that must wait for memory does not delay microbatches that have begun.
        key_sets.append((place, -stage_of(groups)))
        for keys in key_sets:
            ahead = sort_groups(forward, keys)
            for back_keys in (keys, (place, -groups.tail)):
                order = np.concatenate([ahead, sort_groups(backward, back_keys)])
                for policy in (codes.ALTERNATE, codes.BACKWARD_FIRST):
                    for weight in weights:
                        choice = np.array([policy, weight, search.rule, 1, codes.ALL_URGENT], np.int64)
                        yield GroupPriorities(order, choice)
