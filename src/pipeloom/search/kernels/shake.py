"""Local search on the starts of tasks: shift some, and mend the schedule by passes back and forth in time."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pipeloom.compiled import callee, kernel
from pipeloom.compiled.arrays import assign
from pipeloom.compiled.random import draw
from pipeloom.search.kernels.by_rank import Ranks, rollout_by_rank
from pipeloom.search.kernels.codes import ABORTED
from pipeloom.search.kernels.terms import Terms, allowance
from pipeloom.search.packed import DURATION, PLACE, PackedGraph

Array = npt.NDArray[Any]


class Shaking(NamedTuple):
    """How schedules are changed and mended.

    Attributes
    ----------
    span : float
        Nanoseconds by which wished starts are shifted, about.
    passes : int
        Passes over one changed schedule, at most.
    loose : float
        A pass that comes out longer than the current schedule by more than this part ends them.
    lookahead : int
        Up to so many ready tasks may be refused memory before a rank waits; drawn anew for every change.
    """

    span: float
    passes: int
    loose: float
    lookahead: int


class Table(NamedTuple):
    """A schedule under change, int64: see `make_table`.

    ``current`` and ``best`` are orders, rank after rank, and ``when`` the starts of the current one; ``job_row``,
    ``job_task`` the tasks of every job in compressed rows. ``state`` is the current and the best makespan, ``random``
    the state of the random numbers.
    """

    current: Array
    when: Array
    best: Array
    order: Array
    place: Array
    made: Array
    wish: Array
    job_row: Array
    job_task: Array
    state: Array
    random: Array


def make_table(order: Array, when: Array, makespan: int, job_of_task: Array, random: Array) -> Table:
    """A table with a schedule on it: its order, rank after rank, its starts, its makespan."""
    job_row = np.zeros(int(job_of_task.max()) + 2, np.int64)
    np.cumsum(np.bincount(job_of_task), out=job_row[1:])
    job_task = np.lexsort((when, job_of_task))
    other, place, made, wish = (np.zeros(len(order), np.int64) for _ in range(4))
    state = np.array([makespan, makespan], np.int64)
    return Table(order.copy(), when.copy(), order.copy(), other, place, made, wish, job_row, job_task, state, random)


@kernel
def shake(
    p: PackedGraph, reverse: PackedGraph, s: Ranks, mirror: Ranks, t: Table, shaking: Shaking, terms: Terms
) -> int:
    """Change and mend the schedule on the table in about as many passes as the terms say; return the passes made.

    A change shifts wished starts by about ``shaking.span``; the order of the wishes then goes through rollouts in turn
    on the reverse of the graph, which puts tasks as late as possible, and on the graph itself, until one is short
    enough (forward-backward improvement of resource-constrained scheduling, Li and Willis 1992).
    """
    state, random, num_passes = t.state, t.random, terms.num_evaluations
    used = 0
    while used < num_passes:
        if state[1] <= terms.target:
            break
        wish_for(p, t, shaking.span)
        limit = state[0] + 1 + allowance(terms, random)
        loose = max(limit, state[0] + np.int64(state[0] * shaking.loose))
        lookahead = 1 + draw(random) % shaking.lookahead
        backwards = draw(random) % 2 == 0
        makespan = ABORTED
        for turn in range(shaking.passes):
            if used == num_passes:
                break
            bound = limit if turn == shaking.passes - 1 else loose
            if backwards:
                turn_round(s.row, t.made, t.order, t.place)
                makespan = rollout_by_rank(reverse, mirror, t.order, t.place, t.made, lookahead, bound)
                turn_round(s.row, t.made, t.order, t.place)
                assign(t.made, t.order)
            else:
                assign(t.order, t.made)
                for i in range(len(t.order)):
                    t.place[t.order[i]] = i
                makespan = rollout_by_rank(p, s, t.order, t.place, t.made, lookahead, bound)
            used += 1
            if makespan < limit:
                break
            backwards = not backwards
        if makespan < 0 or makespan >= limit:
            continue  # or no pass is left to shorten it
        state[0] = makespan
        assign(t.current, t.made)
        if backwards:
            for number in range(len(t.when)):
                t.when[number] = makespan - mirror.start[number] - p.task[number, DURATION]
        else:
            assign(t.when, s.start)
        if makespan < state[1]:
            state[1] = makespan
            assign(t.best, t.current)
    return used


@callee
def wish_for(p: PackedGraph, t: Table, span: float) -> None:
    """Change the starts of the current schedule a little; ``t.made`` gets the order of the changed ones.

    A whole job moves or two change places, or one direction of a job moves, or one task; or all starts in a
    stretch of time are jolted.
    """
    random = t.random
    assign(t.wish, t.when)
    num_jobs = len(t.job_row) - 1
    kind = draw(random) % 16
    if kind < 5:
        job = draw(random) % num_jobs
        half = -1
        distance = spread(random, 8 * span)
        if kind < 2:
            other = draw(random) % num_jobs
            distance = t.when[t.job_task[t.job_row[other]]] - t.when[t.job_task[t.job_row[job]]]
            for i in range(t.job_row[other], t.job_row[other + 1]):
                t.wish[t.job_task[i]] -= distance
        elif kind > 2:
            half = draw(random) % 2
        for i in range(t.job_row[job], t.job_row[job + 1]):
            number = t.job_task[i]
            if half < 0 or min(p.task[number, PLACE] & 3, 1) == half:
                t.wish[number] += distance
    elif kind < 10:
        t.wish[draw(random) % len(t.wish)] += spread(random, 2 * span)
    else:
        begin = t.when[draw(random) % len(t.when)]
        end = begin + 4 * span * (draw(random) % 1024) / 1024
        jolt = span * (draw(random) % 1024) / 1024
        for number in range(len(t.wish)):
            if begin <= t.when[number] and t.when[number] < end:
                t.wish[number] += np.int64(jolt * ((draw(random) % 1024) / 1024 - 0.5))
    assign(t.made, t.current)
    num_tasks = len(t.made)
    for i in range(1, num_tasks):
        number = t.made[i]
        rank = p.task[number, PLACE] >> 2
        at = i
        # Nearly in order already.
        while at > 0 and t.wish[t.made[at - 1]] > t.wish[number] and p.task[t.made[at - 1], PLACE] >> 2 == rank:
            t.made[at] = t.made[at - 1]
            at -= 1
        t.made[at] = number


@callee
def spread(random: Array, most: float) -> Any:
    """A shift of up to ``most`` either way, mostly a small one."""
    part = (draw(random) % (1 << 20)) / (1 << 20)
    shift = np.int64(most * part * part * part)
    return shift if draw(random) % 2 == 0 else -shift


@callee
def turn_round(row: Array, made: Array, order: Array, place: Array) -> None:
    """Reverse an order of every rank into ``order``, and its inverse into ``place``."""
    for r in range(len(row) - 1):
        for i in range(row[r], row[r + 1]):
            order[i] = made[row[r] + row[r + 1] - 1 - i]
            place[order[i]] = i
