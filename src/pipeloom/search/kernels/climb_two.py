"""Local search over orders where memory does not matter: two changes are tried side by side."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pipeloom.compiled import kernel
from pipeloom.compiled.arrays import assign
from pipeloom.compiled.random import draw, fraction
from pipeloom.search.kernels.climb import change_policy, urgent_of
from pipeloom.search.kernels.expand import arrange
from pipeloom.search.kernels.moves import mutate, mutate_microbatch
from pipeloom.search.kernels.unlimited import rollout_two, rollout_unlimited
from pipeloom.search.problem import Problem
from pipeloom.search.scratch import Scratch

Array = npt.NDArray[Any]


@kernel
def climb_two(
    p: Problem, one: Scratch, two: Scratch, order: Array, choice: Array, orders: Array, choices: Array,
    made: Array, best_order: Array, best_choice: Array, state: Array, random: Array, temperature: float, target: int,
    num_evaluations: int, switch: int, whole: int,
) -> int:  # fmt: skip
    """Local search from ``order``: change it a little, keep what is not worse. Return the evaluations used.

    Parameters
    ----------
    orders, choices : array, shape (2, ...)
        Scratch for the changed orders and choices.
    made : array, shape (2, 2)
        Scratch: their makespans, and how much worse they may be.
    state : array
        The current and the best makespan.
    temperature : float
        A change is kept if it is no worse than the current makespan by more than this times an exponential variate,
        which is drawn first so that the rollout can stop early. Of two changes of the same order the second is compared
        with what the first has left.
    switch : int
        One change in so many is of the policy (0: never).
    whole : int
        Of sixteen changes of the order, so many move whole microbatches.
    """
    n = 0
    while n < num_evaluations and state[1] > target:
        pair = n + 1 < num_evaluations
        for lane in range(2):
            assign(orders[lane], order)
            assign(choices[lane], choice)
            if switch > 0 and draw(random) % switch == 0:
                change_policy(p, choices[lane], random)
            elif whole > 0 and draw(random) % 16 < whole:
                mutate_microbatch(p, orders[lane], order, random)
            else:
                mutate(p, orders[lane], order, random)
            made[lane, 1] = 0
            if temperature > 0.0:
                made[lane, 1] = np.int64(-np.log(fraction(random)) * temperature)
        limit = state[0] + 1
        arrange(p, one, orders[0], urgent_of(choices[0]))
        if pair:
            arrange(p, two, orders[1], urgent_of(choices[1]))
            made[0, 0], made[1, 0] = rollout_two(p, one, two, choices, limit + made[0, 1], limit + made[1, 1])
        else:
            made[0, 0] = rollout_unlimited(p, one, choices[0, 0], choices[0, 1], limit + made[0, 1])
        n += 2 if pair else 1
        for lane in range(2 if pair else 1):
            makespan = made[lane, 0]
            if makespan < 0 or makespan > state[0] + made[lane, 1]:
                continue
            state[0] = makespan
            assign(order, orders[lane])
            assign(choice, choices[lane])
            if makespan < state[1]:
                state[1] = makespan
                assign(best_order, order)
                assign(best_choice, choice)
    return n
