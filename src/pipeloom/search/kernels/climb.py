"""One order's makespan, and local search over orders."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pipeloom.compiled import callee, inlined, kernel
from pipeloom.compiled.arrays import assign, assign_run
from pipeloom.compiled.random import draw, fraction
from pipeloom.search.kernels.codes import ALL_URGENT, UNLIMITED, URGENT
from pipeloom.search.kernels.expand import arrange
from pipeloom.search.kernels.limited import rollout_limited
from pipeloom.search.kernels.moves import mutate, mutate_microbatch
from pipeloom.search.kernels.queues import list_tasks
from pipeloom.search.kernels.unlimited import rollout_unlimited
from pipeloom.search.problem import Problem
from pipeloom.search.scratch import Scratch

Array = npt.NDArray[Any]


@inlined
def rollout(p: Problem, s: Scratch, policy: int, weights: int, rule: int, lookahead: int, bound: int) -> int:
    """Makespan of the schedule that the positions in ``s`` give; `DEADLOCK`; or `ABORTED` at ``bound``.

    ``s.run`` gets the cells of tasks in the order in which they were scheduled.
    """
    if rule == UNLIMITED:
        return rollout_unlimited(p, s, policy, weights, bound)
    return rollout_limited(p, s, policy, weights, rule, lookahead, bound)


@inlined
def urgent_of(choice: Array) -> Any:
    """Number of backward groups that compete with forwards."""
    return choice[URGENT] if len(choice) > URGENT else ALL_URGENT


@kernel
def evaluate(p: Problem, s: Scratch, order: Array, choice: Array, bound: int) -> int:
    """`arrange`, then `rollout`; ``choice`` is policy, weights, rule, lookahead and perhaps the urgent backwards.

    ``s.sequence`` gets the tasks in the order in which they were scheduled (on each rank its running order), unless
    the rollout ended early.
    """
    arrange(p, s, order, urgent_of(choice))
    makespan = rollout(p, s, choice[0], choice[1], choice[2], choice[3], bound)
    if makespan >= 0:
        list_tasks(p, s)
    return makespan


@callee
def change_policy(p: Problem, choice: Array, random: Array) -> None:
    """Change one of the choices beside the order."""
    what = draw(random) % 4
    if what == 0 and p.class_start[3] > p.class_start[2]:
        choice[1] = 1 - choice[1]
    elif what == 1 and choice[2] != UNLIMITED:
        choice[3] = 1 + draw(random) % 4
    elif what == 1 and len(choice) > URGENT:
        # Mostly a few more or fewer than now.
        urgent = min(choice[URGENT], p.num_groups[1]) + draw(random) % 17 - 8
        if draw(random) % 8 == 0:
            urgent = draw(random) % (p.num_groups[1] + 1)
        choice[URGENT] = min(max(urgent, 0), p.num_groups[1])
    else:
        choice[0] = (choice[0] + 1 + draw(random) % 2) % 3


@kernel
def climb(
    p: Problem,
    s: Scratch,
    order: Array,
    choice: Array,
    backup: Array,
    best_order: Array,
    best_choice: Array,
    state: Array,
    random: Array,
    temperature: float,
    target: int,
    num_evaluations: int,
    switch: int,
    whole: int,
) -> int:
    """Local search where memory is limited; see `climb_two`. Return the evaluations used.

    From ``order`` on: change it a little, keep what is not worse.

    ``state`` is the current and the best makespan. A change is kept if it is no worse than the current one
    by more than ``temperature`` times an exponential variate, which is drawn first so that the rollout can
    stop early. ``switch``: one change in so many is of the policy instead (0: never).
    """
    num_groups = p.num_groups[0] + p.num_groups[1]
    for n in range(num_evaluations):
        if state[1] <= target:
            return n
        flip = switch > 0 and draw(random) % switch == 0
        old_policy = choice[0]
        old_weights = choice[1]
        old_lookahead = choice[3]
        old_urgent = urgent_of(choice)
        if flip:
            change_policy(p, choice, random)
        else:
            assign_run(backup, 0, order, 0, num_groups)
            if whole > 0 and draw(random) % 16 < whole:
                mutate_microbatch(p, order, backup, random)
            else:
                mutate(p, order, backup, random)
        # The change before may have been taken back; then the positions are still those of the rejected order.
        arrange(p, s, order, urgent_of(choice))
        limit = state[0] + 1
        if temperature > 0.0:
            uniform = fraction(random)
            limit += np.int64(-np.log(uniform) * temperature)
        makespan = rollout_limited(p, s, choice[0], choice[1], choice[2], choice[3], limit)
        if makespan >= 0:
            state[0] = makespan
            if makespan < state[1]:
                state[1] = makespan
                assign_run(best_order, 0, order, 0, num_groups)
                assign(best_choice, choice)
        elif flip:
            choice[0] = old_policy
            choice[1] = old_weights
            choice[3] = old_lookahead
            if len(choice) > URGENT:
                choice[URGENT] = old_urgent
        else:
            assign_run(order, 0, backup, 0, num_groups)
    return num_evaluations
