"""What all starts have in common, and the orders of microbatches that they use."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import numpy as np

from pipeloom.search.lists import GroupPriorities, Priorities
from pipeloom.search.packed import Groups
from pipeloom.search.state import Search
from pipeloom.taskgraph import IntArray


class Start:
    """Schedules from which a search may start, as a class without instances."""

    name: ClassVar[str]

    @classmethod
    def propose(cls, search: Search) -> Iterator[GroupPriorities | Priorities]:
        """Yield priorities of groups or of tasks, the most promising first; none if the start does not apply."""
        raise NotImplementedError


def turns_of(groups: Groups) -> dict[str, IntArray]:
    """Return the turn of every microbatch under several sort orders, by name."""
    count = int(groups.microbatch.max()) + 1
    work = np.bincount(groups.microbatch, weights=groups.work, minlength=count)
    rising = np.argsort(work, kind="stable")
    # Small ones at both ends, where few microbatches are in flight, and large ones between; and the opposite.
    hill = np.concatenate([rising[::2], rising[1::2][::-1]])
    valley = np.concatenate([rising[::-1][::2], rising[::-1][1::2][::-1]])
    # Multiples of the golden ratio modulo 1 are evenly spread, so any few neighbors include small and large ones.
    spread = np.argsort(np.argsort(np.arange(count) * ((5**0.5 - 1) / 2) % 1.0))
    # A few of the smaller half warm the pipeline up quickly; the others remain for the cool-down.
    half = rising[: count // 2]
    few = half[::4]
    sortings = {
        "first in, first out": np.arange(count),
        "large first": rising[::-1],
        "small first": rising,
        "large between": hill,
        "small between": valley,
        "few small, then large": np.concatenate([few, np.setdiff1d(rising[::-1], few, assume_unique=True)]),
        "evenly mixed": rising[spread],
    }
    turns = {}
    for name, sequence in sortings.items():
        turn = np.empty(count, np.int64)
        turn[sequence] = np.arange(count)
        turns[name] = turn
    return turns


def halves(search: Search) -> tuple[IntArray, IntArray]:
    """Return the numbers of the forward groups and of the backward groups."""
    num_forward, num_backward = search.packed.num_groups.tolist()
    return np.arange(num_forward), np.arange(num_forward, num_forward + num_backward)


def stage_of(groups: Groups) -> IntArray:
    """Return a number for every group. Later modules and passes have larger numbers."""
    stage: IntArray = groups.module * (1 + int(groups.depth.max(initial=0))) + groups.depth
    return stage


def sort_groups(groups: IntArray, keys: tuple[IntArray, ...]) -> IntArray:
    """Return the groups sorted by keys. The last key is the primary key."""
    order: IntArray = groups[np.lexsort(tuple(key[groups] for key in keys))]
    return order
