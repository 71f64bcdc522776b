"""Positions of segments and makespan of an order of groups, and local search over such orders."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from pipeloom.compiled import Array, callee, kernel, pointer
from pipeloom.compiled.arrays import assign
from pipeloom.search.kernels.codes import ALL_URGENT, LOOKAHEAD, POLICY, RULE, URGENT, WEIGHTS
from pipeloom.search.kernels.decode import decode
from pipeloom.search.kernels.queues import list_tasks
from pipeloom.search.kernels.terms import Terms, allowance
from pipeloom.search.moves import propose_order
from pipeloom.search.moves.group_order import GroupOrder
from pipeloom.search.moves.move import IMPROVED, Tally, draw_move
from pipeloom.search.packed import PackedGraph
from pipeloom.search.scratch import Scratch


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
    trial_order, trial_choice : array
        Scratch: a changed order and choice.
    """

    order: Array
    choice: Array
    best_order: Array
    best_choice: Array
    state: Array
    random: Array
    trial_order: Array
    trial_choice: Array


def make_walk(order: Array, choice: Array, makespan: int, random: Array) -> Walk:
    """Start from an order and choice with a known makespan."""
    state = np.array([makespan, makespan], np.int64)
    return Walk(order.copy(), choice.copy(), order.copy(), choice.copy(), state, random, order.copy(), choice.copy())


@kernel
def expand(packed: PackedGraph, scratch: Scratch, order: Array) -> None:
    """Run `arrange` with all backwards urgent."""
    arrange(packed, scratch, order, ALL_URGENT)


@callee
def arrange(packed: PackedGraph, scratch: Scratch, order: Array, urgent: int) -> None:
    """Turn an order of groups (forward groups, then backward groups) into positions of segments in their class.

    The segments of a group are consecutive. Weight gradients have the order of their backward groups. Only the first
    ``urgent`` backward groups compete with forwards. The others begin at a new bit of the summary.
    """
    at, position, base = pointer(scratch.at), pointer(scratch.position), pointer(packed.base)
    group_start, group_segment = pointer(packed.group_start), pointer(packed.group_segment)
    unit = 64 << scratch.group_shift
    place = 0
    for i in range(packed.num_groups[0]):
        group = order[i]
        for k in range(group_start[group], group_start[group + 1]):
            pass_id = group_segment[k]
            at[place] = base[pass_id]
            position[pass_id] = place
            place += 1
    second, third = scratch.second, scratch.third
    place = 0
    weight = 0
    scratch.urgent[0] = -1
    for i in range(packed.num_groups[1]):
        if i == urgent:
            place = (place + unit - 1) // unit * unit
            if place < 64 * unit:
                scratch.urgent[0] = (1 << (place // unit)) - 1
        group = order[packed.num_groups[0] + i]
        for k in range(group_start[group], group_start[group + 1]):
            pass_id = group_segment[k]
            at[second + place] = base[pass_id]
            position[pass_id] = place
            place += 1
        for k in range(packed.weight_start[group], packed.weight_start[group + 1]):
            pass_id = packed.weight_segment[k]
            at[third + weight] = base[pass_id]
            position[pass_id] = weight
            weight += 1


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
def propose(graph: PackedGraph, walk: Walk, tally: Tally) -> Any:
    """Write a change of the current order and choice into the trial ones; return the number of the move."""
    assign(walk.trial_order, walk.order)
    assign(walk.trial_choice, walk.choice)
    which = draw_move(tally, walk.random)
    changed = GroupOrder(
        walk.trial_order,
        walk.order,
        walk.trial_choice,
        graph.num_groups[0],
        graph.group_microbatch,
        graph.class_start[3] > graph.class_start[2],
        walk.random,
    )
    propose_order(which, changed)
    return which


@kernel
def climb(graph: PackedGraph, scratch: Scratch, walk: Walk, tally: Tally, terms: Terms) -> int:
    """Local search from an order: keep changes that are not worse. Return the number of evaluations."""
    state, choice = walk.state, walk.trial_choice
    n = 0
    while n < terms.num_evaluations and state[1] > terms.target:
        n += 1
        which = propose(graph, walk, tally)
        bound = state[0] + 1 + allowance(terms, walk.random)
        arrange(graph, scratch, walk.trial_order, choice[URGENT])
        makespan = decode(graph, scratch, choice[POLICY], choice[WEIGHTS], choice[RULE], choice[LOOKAHEAD], bound)
        if makespan < 0:
            continue
        if makespan < state[0]:
            tally.counts[which, IMPROVED] += 1
        state[0] = makespan
        assign(walk.order, walk.trial_order)
        assign(walk.choice, choice)
        if makespan < state[1]:
            state[1] = makespan
            assign(walk.best_order, walk.order)
            assign(walk.best_choice, walk.choice)
    return n
