"""Local search on task starts: shift some of them and repair the schedule by passes in both directions of time."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pipeloom.compiled import callee, kernel
from pipeloom.compiled.arrays import assign
from pipeloom.compiled.random import draw
from pipeloom.search.kernels.by_task import Ranks, decode_by_task
from pipeloom.search.kernels.codes import ABORTED
from pipeloom.search.kernels.terms import Terms, allowance
from pipeloom.search.packed import DURATION, PLACE, PackedGraph

Array = npt.NDArray[Any]


class Perturbation(NamedTuple):
    """How schedules are perturbed and repaired.

    Attributes
    ----------
    span : float
        Typical shift of a start, in ns.
    passes : int
        Maximum number of passes over one perturbed schedule.
    loose : float
        Passes end when one is longer than the current schedule by more than this fraction.
    lookahead : int
        Maximum number of ready tasks that may lack memory before a rank waits. It is drawn for each perturbation.
    """

    span: float
    passes: int
    loose: float
    lookahead: int


class Table(NamedTuple):
    """The current and the best schedule, int64; see `make_table`.

    ``current`` and ``best`` are orders, rank after rank. ``when`` holds the starts of the current order.
    ``component_row`` and ``component_task`` are the tasks of every component in compressed rows. ``state`` holds the
    current and the best makespan, and ``random`` the state of the random numbers.
    """

    current: Array
    when: Array
    best: Array
    order: Array
    made: Array
    shifted: Array
    component_row: Array
    component_task: Array
    state: Array
    random: Array


def make_table(order: Array, when: Array, makespan: int, component_of_task: Array, random: Array) -> Table:
    """Return a table with a schedule: its order by rank, its starts and its makespan."""
    component_row = np.zeros(int(component_of_task.max()) + 2, np.int64)
    np.cumsum(np.bincount(component_of_task), out=component_row[1:])
    component_task = np.lexsort((when, component_of_task))
    other, made, shifted = (np.zeros(len(order), np.int64) for _ in range(3))
    state = np.array([makespan, makespan], np.int64)
    return Table(
        order.copy(), when.copy(), order.copy(), other, made, shifted, component_row, component_task, state, random
    )


@kernel
def perturb(
    p: PackedGraph, reverse: PackedGraph, s: Ranks, mirror: Ranks, t: Table, perturbation: Perturbation, terms: Terms
) -> int:
    """Perturb and repair the schedule in the table; return the number of passes. ``terms`` limits this number.

    A perturbation shifts starts by about ``perturbation.span``. List scheduling of the resulting order then alternates
    between the reversed graph, which puts tasks as late as possible, and the graph itself, until one result is short
    enough (forward-backward improvement of resource-constrained scheduling, Li and Willis 1992).
    """
    state, random, num_passes = t.state, t.random, terms.num_evaluations
    used = 0
    while used < num_passes:
        if state[1] <= terms.target:
            break
        shift_starts(p, t, perturbation.span)
        limit = state[0] + 1 + allowance(terms, random)
        loose = max(limit, state[0] + np.int64(state[0] * perturbation.loose))
        lookahead = 1 + draw(random) % perturbation.lookahead
        backwards = draw(random) % 2 == 0
        makespan = ABORTED
        for turn in range(perturbation.passes):
            if used == num_passes:
                break
            bound = limit if turn == perturbation.passes - 1 else loose
            if backwards:
                turn_round(s.row, t.made, t.order)
                makespan = decode_by_task(reverse, mirror, t.order, t.made, lookahead, bound, None)
                turn_round(s.row, t.made, t.order)
                assign(t.made, t.order)
            else:
                assign(t.order, t.made)
                makespan = decode_by_task(p, s, t.order, t.made, lookahead, bound, None)
            used += 1
            if makespan < limit:
                break
            backwards = not backwards
        if makespan < 0 or makespan >= limit:
            continue  # no pass shortened it enough, or no passes remain
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
def shift_starts(p: PackedGraph, t: Table, span: float) -> None:
    """Perturb the starts of the current schedule; ``t.made`` receives the order of the perturbed starts.

    Either a whole component moves, two components change places, one direction of a component moves, one task moves, or
    all starts within a time window are perturbed.
    """
    random = t.random
    assign(t.shifted, t.when)
    num_components = len(t.component_row) - 1
    kind = draw(random) % 16
    if kind < 5:
        component = draw(random) % num_components
        half = -1
        distance = spread(random, 8 * span)
        if kind < 2:
            other = draw(random) % num_components
            distance = (
                t.when[t.component_task[t.component_row[other]]] - t.when[t.component_task[t.component_row[component]]]
            )
            for i in range(t.component_row[other], t.component_row[other + 1]):
                t.shifted[t.component_task[i]] -= distance
        elif kind > 2:
            half = draw(random) % 2
        for i in range(t.component_row[component], t.component_row[component + 1]):
            number = t.component_task[i]
            if half < 0 or min(p.task[number, PLACE] & 3, 1) == half:
                t.shifted[number] += distance
    elif kind < 10:
        t.shifted[draw(random) % len(t.shifted)] += spread(random, 2 * span)
    else:
        begin = t.when[draw(random) % len(t.when)]
        end = begin + 4 * span * (draw(random) % 1024) / 1024
        amplitude = span * (draw(random) % 1024) / 1024
        for number in range(len(t.shifted)):
            if begin <= t.when[number] and t.when[number] < end:
                t.shifted[number] += np.int64(amplitude * ((draw(random) % 1024) / 1024 - 0.5))
    assign(t.made, t.current)
    num_tasks = len(t.made)
    for i in range(1, num_tasks):
        number = t.made[i]
        rank = p.task[number, PLACE] >> 2
        at = i
        # An insertion sort, since the order is nearly sorted.
        while at > 0 and t.shifted[t.made[at - 1]] > t.shifted[number] and p.task[t.made[at - 1], PLACE] >> 2 == rank:
            t.made[at] = t.made[at - 1]
            at -= 1
        t.made[at] = number


@callee
def spread(random: Array, most: float) -> Any:
    """Return a random shift of up to ``most`` in either direction, mostly a small one."""
    part = (draw(random) % (1 << 20)) / (1 << 20)
    shift = np.int64(most * part * part * part)
    return shift if draw(random) % 2 == 0 else -shift


@callee
def turn_round(row: Array, made: Array, order: Array) -> None:
    """Reverse an order of every rank into ``order``."""
    for r in range(len(row) - 1):
        for i in range(row[r], row[r + 1]):
            order[i] = made[row[r] + row[r + 1] - 1 - i]
