"""The best orders that a tabu search has met, and blends with them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pipeloom.compiled import Array, callee
from pipeloom.compiled.random import draw
from pipeloom.search.kernels.codes import NEVER

SIZE = 8
"""Maximum number of orders in a pool."""
PARTS = 16
"""Shares of the two orders in a blend are multiples of one in `PARTS`."""


class Pool(NamedTuple):
    """Orders of all tasks with different makespans, in ns; `NEVER` for rows without an order.

    ``turn`` has the place of every task in a topological order, shape (SIZE, num_tasks).
    """

    turn: Array
    makespan: Array


def make_pool(num_tasks: int) -> Pool:
    """Return an empty pool."""
    return Pool(np.zeros((SIZE, num_tasks), np.int64), np.full(SIZE, NEVER, np.int64))


@callee
def enter(pool: Pool, order: Array, makespan: int) -> None:
    """Replace the longest schedule of the pool by a shorter one, unless one is as long as the new one."""
    longest = 0
    for k in range(SIZE):
        if pool.makespan[k] == makespan:
            return
        if pool.makespan[k] > pool.makespan[longest]:
            longest = k
    if makespan < pool.makespan[longest]:
        pool.makespan[longest] = makespan
        for i in range(len(order)):
            pool.turn[longest, order[i]] = i


@callee
def blend(pool: Pool, turn: Array, blended: Array, random: Array) -> None:
    """Write weighted sums of the turns of an order and of one in the pool, which must not be empty."""
    other = draw(random) % SIZE
    if pool.makespan[other] == NEVER:
        other = 0  # the first order is there
    share = 1 + draw(random) % (PARTS - 1)
    for number in range(len(turn)):
        blended[number] = (PARTS - share) * turn[number] + share * pool.turn[other, number]
