"""Local search over orders without memory limits; two changes are tried at a time."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy.typing as npt

from pipeloom.compiled import kernel
from pipeloom.compiled.arrays import assign
from pipeloom.compiled.random import draw
from pipeloom.search.kernels.climb import change_policy, urgent_of
from pipeloom.search.kernels.codes import POLICY, WEIGHTS
from pipeloom.search.kernels.expand import arrange
from pipeloom.search.kernels.moves import mutate, mutate_microbatch
from pipeloom.search.kernels.terms import Moves, Terms, Walk, allowance
from pipeloom.search.kernels.unlimited import decode_two, decode_unlimited
from pipeloom.search.packed import PackedGraph
from pipeloom.search.scratch import Scratch

Array = npt.NDArray[Any]


class Two(NamedTuple):
    """Scratch for two changes tried side by side.

    Attributes
    ----------
    orders, choices : array, shape (2, ...)
        The two changed orders and choices.
    made : array, shape (2, 2)
        Makespan of each, and its allowed increase over the current makespan, in ns.
    """

    orders: Array
    choices: Array
    made: Array


@kernel
def climb_two(p: PackedGraph, one: Scratch, two: Scratch, w: Walk, t: Two, terms: Terms, moves: Moves) -> int:
    """Local search from an order: keep changes that are not worse. Return the number of evaluations.

    Both changes start from the same order. The second is compared with the result of the first.
    """
    order, choice, state, random = w.order, w.choice, w.state, w.random
    orders, choices, made = t.orders, t.choices, t.made
    n = 0
    while n < terms.num_evaluations and state[1] > terms.target:
        pair = n + 1 < terms.num_evaluations
        for lane in range(2):
            assign(orders[lane], order)
            assign(choices[lane], choice)
            if moves.switch_every > 0 and draw(random) % moves.switch_every == 0:
                change_policy(p, choices[lane], random)
            elif moves.whole_microbatches > 0 and draw(random) % 16 < moves.whole_microbatches:
                mutate_microbatch(p, orders[lane], order, random)
            else:
                mutate(p, orders[lane], order, random)
            made[lane, 1] = allowance(terms, random)
        limit = state[0] + 1
        arrange(p, one, orders[0], urgent_of(choices[0]))
        if pair:
            arrange(p, two, orders[1], urgent_of(choices[1]))
            made[0, 0], made[1, 0] = decode_two(p, one, two, choices, limit + made[0, 1], limit + made[1, 1])
        else:
            made[0, 0] = decode_unlimited(p, one, choices[0, POLICY], choices[0, WEIGHTS], limit + made[0, 1])
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
                assign(w.best_order, order)
                assign(w.best_choice, choice)
    return n
