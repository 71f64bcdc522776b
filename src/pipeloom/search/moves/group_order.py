"""Moves of group orders, and what they see."""

from __future__ import annotations

from typing import NamedTuple

from pipeloom.compiled import Array, callee
from pipeloom.compiled.arrays import assign_run
from pipeloom.compiled.random import draw
from pipeloom.search.kernels.codes import LOOKAHEAD, POLICY, RULE, UNLIMITED, URGENT, WEIGHTS
from pipeloom.search.moves.move import Move


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


class MoveGroups(Move):
    """Move one to four consecutive groups to another place of the same half."""

    name = "move groups"
    weight = 64

    @staticmethod
    @callee
    def propose(now: GroupOrder) -> None:
        """Move the run at the first place to the second."""
        source, goal = draw_places(now)
        order, old = now.order, now.before
        run = 1
        if draw(now.random) % 4 == 0:
            run = 1 + draw(now.random) % 4
        if source < goal:
            run = min(run, goal - source)
            assign_run(order, source, old, source + run, goal + 1 - run - source)
            assign_run(order, goal + 1 - run, old, source, run)
        elif goal < source:
            end = now.num_forward if source < now.num_forward else len(order)
            run = min(run, end - source)
            assign_run(order, goal + run, old, goal, source - goal)
            assign_run(order, goal, old, source, run)


class ChangePolicy(Move):
    """Change which kind runs first, when weight gradients run, the lookahead, or how many backwards are urgent."""

    name = "change the policy"
    weight = 8

    @staticmethod
    @callee
    def propose(now: GroupOrder) -> None:
        """Change one entry of the choice."""
        choice, random = now.choice, now.random
        what = draw(random) % 4
        if what == 0 and now.has_weights:
            choice[WEIGHTS] = 1 - choice[WEIGHTS]
        elif what == 1 and choice[RULE] != UNLIMITED:
            choice[LOOKAHEAD] = 1 + draw(random) % 4
        elif what == 1:
            num_backward = len(now.order) - now.num_forward
            # The change is mostly small.
            urgent = min(choice[URGENT], num_backward) + draw(random) % 17 - 8
            if draw(random) % 8 == 0:
                urgent = draw(random) % (num_backward + 1)
            choice[URGENT] = min(max(urgent, 0), num_backward)
        else:
            choice[POLICY] = (choice[POLICY] + 1 + draw(random) % 2) % 3
