"""Random changes to an order of groups."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from pipeloom.compiled import callee
from pipeloom.compiled.arrays import assign_run
from pipeloom.compiled.random import draw
from pipeloom.search.packed import PackedGraph

Array = npt.NDArray[Any]


@callee
def mutate(p: PackedGraph, order: Array, backup: Array, random: Array) -> None:
    """Swap two groups or move a run of groups, mostly by a few places. ``backup`` is a copy of the order."""
    num_forward = p.num_groups[0]
    low = 0
    size = num_forward
    if p.num_groups[1] > 1 and (num_forward < 2 or draw(random) % 2 == 0):
        low = num_forward
        size = p.num_groups[1]
    if size < 2:
        return
    reach = size
    kind = draw(random) % 8
    if kind < 3:
        reach = min(size, 4)
    elif kind < 6:
        reach = min(size, 4 + size // 8)
    a = draw(random) % size
    step = 1 + draw(random) % (reach - 1)
    b = a + step if draw(random) % 2 == 0 else a - step
    b = min(max(b, 0), size - 1)
    if a == b:
        b = a + 1 if a + 1 < size else a - 1
    if draw(random) % 3 == 0:
        order[low + a], order[low + b] = order[low + b], order[low + a]
        return
    run = 1
    if draw(random) % 4 == 0:
        run = 1 + draw(random) % 4
    if a < b:
        run = min(run, b - a)
        assign_run(order, low + a, backup, low + a + run, b + 1 - run - a)
        assign_run(order, low + b + 1 - run, backup, low + a, run)
    else:
        run = min(run, size - a)
        assign_run(order, low + b + run, backup, low + b, a - b)
        assign_run(order, low + b, backup, low + a, run)


@callee
def mutate_microbatch(p: PackedGraph, order: Array, backup: Array, random: Array) -> None:
    """Exchange all groups of two microbatches, or move the groups of one microbatch beside those of the other."""
    num_forward = p.num_groups[0]
    owner = p.group_microbatch
    a = draw(random) % num_forward
    reach = 24 if draw(random) % 2 == 0 else num_forward
    b = a + draw(random) % (2 * reach + 1) - reach
    one = owner[order[a]]
    other = owner[order[min(max(b, 0), num_forward - 1)]]
    if one == other:
        return
    exchange = draw(random) % 2 == 0
    before = draw(random) % 2 == 0
    for half in range(2):
        low = 0 if half == 0 else num_forward
        high = num_forward + half * p.num_groups[1]
        j = low
        if exchange:
            for i in range(low, high):
                if owner[backup[i]] == one:
                    while j < high and owner[backup[j]] != other:
                        j += 1
                    if j == high:
                        break
                    order[i], order[j] = backup[j], backup[i]
                    j += 1
            continue
        left = 0
        for i in range(low, high):
            left += owner[backup[i]] == other
        if left == 0:
            # The other microbatch has no backward to move beside.
            continue
        at = low
        for i in range(low, high):
            if owner[backup[i]] == one:
                continue
            meets = owner[backup[i]] == other
            if not (meets and before):
                order[at] = backup[i]
                at += 1
            if meets:
                left -= 1
                while j < high:
                    if owner[backup[j]] == one:
                        order[at] = backup[j]
                        at += 1
                        if left > 0:
                            j += 1
                            break
                    j += 1
                if before:
                    order[at] = backup[i]
                    at += 1
