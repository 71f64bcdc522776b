"""Makespan of one order, and local search over orders."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from pipeloom.compiled import callee, inlined, kernel
from pipeloom.compiled.arrays import assign, assign_run
from pipeloom.compiled.random import draw
from pipeloom.search.kernels.codes import ALL_URGENT, LOOKAHEAD, POLICY, RULE, UNLIMITED, URGENT, WEIGHTS
from pipeloom.search.kernels.expand import arrange
from pipeloom.search.kernels.limited import decode_limited
from pipeloom.search.kernels.moves import mutate, mutate_microbatch
from pipeloom.search.kernels.queues import list_tasks
from pipeloom.search.kernels.terms import Moves, Terms, Walk, allowance
from pipeloom.search.kernels.unlimited import decode_unlimited
from pipeloom.search.packed import PackedGraph
from pipeloom.search.scratch import Scratch

Array = npt.NDArray[Any]


@inlined
def decode(p: PackedGraph, s: Scratch, policy: int, weights: int, rule: int, lookahead: int, bound: int) -> int:
    """Return the makespan of the positions in ``s``, `DEADLOCK`, or `ABORTED` at ``bound``.

    ``s.run`` receives the cells of the tasks in the order in which they were scheduled.
    """
    if rule == UNLIMITED:
        return decode_unlimited(p, s, policy, weights, bound)
    return decode_limited(p, s, policy, weights, rule, lookahead, bound)


@inlined
def urgent_of(choice: Array) -> Any:
    """Return the number of backward groups that compete with forwards."""
    return choice[URGENT] if len(choice) > URGENT else ALL_URGENT


@kernel
def evaluate(p: PackedGraph, s: Scratch, order: Array, choice: Array, bound: int) -> int:
    """Run `arrange` and `decode`.

    ``choice`` holds policy, weights, rule, lookahead and optionally the number of urgent backward groups.
    ``s.sequence`` receives the tasks in the order in which they were scheduled, unless list scheduling ended early.
    On each rank, this is the running order.
    """
    arrange(p, s, order, urgent_of(choice))
    makespan = decode(p, s, choice[POLICY], choice[WEIGHTS], choice[RULE], choice[LOOKAHEAD], bound)
    if makespan >= 0:
        list_tasks(p, s)
    return makespan


@callee
def change_policy(p: PackedGraph, choice: Array, random: Array) -> None:
    """Change one of the choices other than the order."""
    what = draw(random) % 4
    if what == 0 and p.class_start[3] > p.class_start[2]:
        choice[WEIGHTS] = 1 - choice[WEIGHTS]
    elif what == 1 and choice[RULE] != UNLIMITED:
        choice[LOOKAHEAD] = 1 + draw(random) % 4
    elif what == 1 and len(choice) > URGENT:
        # The change is mostly small.
        urgent = min(choice[URGENT], p.num_groups[1]) + draw(random) % 17 - 8
        if draw(random) % 8 == 0:
            urgent = draw(random) % (p.num_groups[1] + 1)
        choice[URGENT] = min(max(urgent, 0), p.num_groups[1])
    else:
        choice[POLICY] = (choice[POLICY] + 1 + draw(random) % 2) % 3


@kernel
def climb(p: PackedGraph, s: Scratch, w: Walk, backup: Array, terms: Terms, moves: Moves) -> int:
    """Local search with limited memory; see `climb_two`. Return the number of evaluations.

    ``backup`` is scratch, as long as the order.
    """
    order, choice, state, random = w.order, w.choice, w.state, w.random
    num_groups = p.num_groups[0] + p.num_groups[1]
    for n in range(terms.num_evaluations):
        if state[1] <= terms.target:
            return n
        flip = moves.switch_every > 0 and draw(random) % moves.switch_every == 0
        old_policy = choice[POLICY]
        old_weights = choice[WEIGHTS]
        old_lookahead = choice[LOOKAHEAD]
        old_urgent = urgent_of(choice)
        if flip:
            change_policy(p, choice, random)
        else:
            assign_run(backup, 0, order, 0, num_groups)
            if moves.whole_microbatches > 0 and draw(random) % 16 < moves.whole_microbatches:
                mutate_microbatch(p, order, backup, random)
            else:
                mutate(p, order, backup, random)
        # If the previous change was rejected, the positions are still those of the rejected order.
        arrange(p, s, order, urgent_of(choice))
        limit = state[0] + 1 + allowance(terms, random)
        makespan = decode_limited(p, s, choice[POLICY], choice[WEIGHTS], choice[RULE], choice[LOOKAHEAD], limit)
        if makespan >= 0:
            state[0] = makespan
            if makespan < state[1]:
                state[1] = makespan
                assign_run(w.best_order, 0, order, 0, num_groups)
                assign(w.best_choice, choice)
        elif flip:
            choice[POLICY] = old_policy
            choice[WEIGHTS] = old_weights
            choice[LOOKAHEAD] = old_lookahead
            if len(choice) > URGENT:
                choice[URGENT] = old_urgent
        else:
            assign_run(order, 0, backup, 0, num_groups)
    return terms.num_evaluations
