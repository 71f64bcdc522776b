"""Makespan of an order of groups, and local search over such orders."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pipeloom.compiled import callee, inlined, kernel
from pipeloom.compiled.arrays import assign
from pipeloom.search.kernels.codes import ALL_URGENT, LOOKAHEAD, POLICY, RULE, UNLIMITED, URGENT, WEIGHTS
from pipeloom.search.kernels.expand import arrange
from pipeloom.search.kernels.limited import decode_limited
from pipeloom.search.kernels.queues import list_tasks
from pipeloom.search.kernels.terms import Terms, allowance
from pipeloom.search.kernels.unlimited import decode_two, decode_unlimited
from pipeloom.search.moves import propose_order
from pipeloom.search.moves.group_order import GroupOrder
from pipeloom.search.moves.move import IMPROVED, Tally, draw_move
from pipeloom.search.packed import PackedGraph
from pipeloom.search.scratch import Scratch

Array = npt.NDArray[Any]

LANES = 2
"""Number of changes that are tried side by side without memory limits; see `pipeloom.search.kernels.unlimited`."""


class Walk(NamedTuple):
    """The state of a local search of group orders.

    Attributes
    ----------
    order, choice : array
        The current order and choice.
    best_order, best_choice : array
        The best order and choice.
    state : array, shape (2,)
        The current and the best makespan, in ns.
    random : array, shape (1,)
        State of the random numbers.
    orders, choices : array, shape (LANES, ...)
        Scratch: the changed orders and choices.
    tried : array, shape (LANES, 3)
        Scratch: makespan of each, its allowed increase over the current makespan in ns, and the number of its move.
    """

    order: Array
    choice: Array
    best_order: Array
    best_choice: Array
    state: Array
    random: Array
    orders: Array
    choices: Array
    tried: Array


def make_walk(order: Array, choice: Array, makespan: int, random: Array) -> Walk:
    """Start from an order and choice with a known makespan."""
    orders, choices = np.empty((LANES, len(order)), np.int64), np.empty((LANES, len(choice)), np.int64)
    state, tried = np.array([makespan, makespan], np.int64), np.zeros((LANES, 3), np.int64)
    return Walk(order.copy(), choice.copy(), order.copy(), choice.copy(), state, random, orders, choices, tried)


@inlined
def decode(
    graph: PackedGraph, scratch: Scratch, policy: int, weights: int, rule: int, lookahead: int, bound: int
) -> int:
    """Return the makespan of the positions in ``scratch``, `DEADLOCK`, or `ABORTED` at ``bound``.

    ``scratch.run`` receives the cells of the tasks in the order in which they were scheduled.
    """
    if rule == UNLIMITED:
        return decode_unlimited(graph, scratch, policy, weights, bound)
    return decode_limited(graph, scratch, policy, weights, rule, lookahead, bound)


@kernel
def evaluate(graph: PackedGraph, scratch: Scratch, order: Array, choice: Array, bound: int) -> int:
    """Run `arrange` and `decode`.

    ``choice`` holds policy, weights, rule, lookahead and optionally the number of urgent backward groups.
    ``scratch.sequence`` receives the tasks in the order in which they were scheduled, unless list scheduling ended
    early. On each rank, this is the running order.
    """
    arrange(graph, scratch, order, choice[URGENT] if len(choice) > URGENT else ALL_URGENT)
    makespan = decode(graph, scratch, choice[POLICY], choice[WEIGHTS], choice[RULE], choice[LOOKAHEAD], bound)
    if makespan >= 0:
        list_tasks(graph, scratch)
    return makespan


@callee
def propose(graph: PackedGraph, walk: Walk, tally: Tally, lane: int, terms: Terms) -> None:
    """Write a change of the current order and choice into a lane."""
    assign(walk.orders[lane], walk.order)
    assign(walk.choices[lane], walk.choice)
    which = draw_move(tally, walk.random)
    changed = GroupOrder(
        walk.orders[lane],
        walk.order,
        walk.choices[lane],
        graph.num_groups[0],
        graph.group_microbatch,
        graph.class_start[3] > graph.class_start[2],
        walk.random,
    )
    propose_order(which, changed)
    walk.tried[lane, 1] = allowance(terms, walk.random)
    walk.tried[lane, 2] = which


@kernel
def climb(graph: PackedGraph, first: Scratch, second: Scratch, walk: Walk, tally: Tally, terms: Terms) -> int:
    """Local search from an order: keep changes that are not worse. Return the number of evaluations.

    Without memory limits, two changes start from the same order and are evaluated side by side. The second is compared
    with the result of the first.
    """
    state, choices, tried = walk.state, walk.choices, walk.tried
    limited = walk.choice[RULE] != UNLIMITED
    n = 0
    while n < terms.num_evaluations and state[1] > terms.target:
        count = 1 if limited or n + 1 == terms.num_evaluations else LANES
        for lane in range(count):
            propose(graph, walk, tally, lane, terms)
        limit = state[0] + 1 + tried[0, 1]
        choice = choices[0]
        arrange(graph, first, walk.orders[0], choice[URGENT])
        if limited:
            tried[0, 0] = decode_limited(
                graph, first, choice[POLICY], choice[WEIGHTS], choice[RULE], choice[LOOKAHEAD], limit
            )
        elif count == 1:
            tried[0, 0] = decode_unlimited(graph, first, choice[POLICY], choice[WEIGHTS], limit)
        else:
            arrange(graph, second, walk.orders[1], choices[1, URGENT])
            other_limit = state[0] + 1 + tried[1, 1]
            tried[0, 0], tried[1, 0] = decode_two(graph, first, second, choices, limit, other_limit)
        n += count
        for lane in range(count):
            makespan = tried[lane, 0]
            if makespan < 0 or makespan > state[0] + tried[lane, 1]:
                continue
            if makespan < state[0]:
                tally.counts[tried[lane, 2], IMPROVED] += 1
            state[0] = makespan
            assign(walk.order, walk.orders[lane])
            assign(walk.choice, choices[lane])
            if makespan < state[1]:
                state[1] = makespan
                assign(walk.best_order, walk.order)
                assign(walk.best_choice, walk.choice)
    return n
