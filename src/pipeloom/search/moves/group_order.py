"""Moves of group orders, and what they see."""

from __future__ import annotations

from typing import NamedTuple

from pipeloom.compiled import Array, callee
from pipeloom.compiled.random import draw


class GroupOrder(NamedTuple):
    """An order of groups, from which list scheduling makes a schedule. A move changes ``order`` or ``choice`` in place.

    Attributes
    ----------
    order : array, shape (num_groups,)
        Forward groups, the most urgent first, then backward groups. A group never leaves its half.
    before : array, shape (num_groups,)
        The order before the move.
    choice : array, shape (5,)
        Policies of list scheduling; see `pipeloom.search.kernels.codes`.
    num_forward : int
        Number of forward groups.
    microbatch : array, shape (num_groups,)
        Microbatch of every group.
    has_weights : bool
        Whether the graph has weight-gradient tasks.
    random : array
        State of the random numbers; see `pipeloom.compiled.random`.
    """

    order: Array
    before: Array
    choice: Array
    num_forward: int
    microbatch: Array
    has_weights: bool
    random: Array


@callee
def draw_places(now: GroupOrder) -> tuple[int, int]:
    """Draw two different places in the same half of the order, mostly near each other; equal if there is only one."""
    random, num_forward = now.random, now.num_forward
    num_backward = len(now.order) - num_forward
    low = 0
    size = num_forward
    if num_backward > 1 and (num_forward < 2 or draw(random) % 2 == 0):
        low = num_forward
        size = num_backward
    if size < 2:
        return low, low
    reach = size
    kind = draw(random) % 8
    if kind < 3:
        reach = min(size, 4)
    elif kind < 6:
        reach = min(size, 4 + size // 8)
    one = draw(random) % size
    step = 1 + draw(random) % (reach - 1)
    other = one + step if draw(random) % 2 == 0 else one - step
    other = min(max(other, 0), size - 1)
    if one == other:
        other = one + 1 if one + 1 < size else one - 1
    return low + one, low + other


@callee
def draw_microbatches(now: GroupOrder) -> tuple[int, int]:
    """Draw two microbatches, by two places in the forward order that are near each other half of the time."""
    random, num_forward = now.random, now.num_forward
    place = draw(random) % num_forward
    reach = 24 if draw(random) % 2 == 0 else num_forward
    other = place + draw(random) % (2 * reach + 1) - reach
    return now.microbatch[now.order[place]], now.microbatch[now.order[min(max(other, 0), num_forward - 1)]]
