"""Local search on task starts: shift some of them and repair the schedule by passes in both directions of time."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from pipeloom.compiled import Array, callee, kernel
from pipeloom.compiled.arrays import assign
from pipeloom.compiled.random import draw
from pipeloom.search.kernels.blocks import Blocks
from pipeloom.search.kernels.by_task import Ranks, decode_by_task
from pipeloom.search.kernels.codes import ABORTED
from pipeloom.search.kernels.terms import Terms, allowance
from pipeloom.search.moves import propose_starts
from pipeloom.search.moves.move import IMPROVED, Tally, draw_move
from pipeloom.search.moves.start_times import StartTimes
from pipeloom.search.packed import DURATION, PLACE, PackedGraph
from pipeloom.taskgraph.rows import row_start

LOOSE = 1 / 32
"""Passes end when one is longer than the current schedule by more than this fraction."""


class Perturbation(NamedTuple):
    """How schedules are perturbed and repaired; see `pipeloom.search.params.JustificationParams`.

    ``span`` is the typical shift of a start, in ns.
    """

    span: float
    passes: int
    lookahead: int


class Table(NamedTuple):
    """The current and the best schedule, int64; see `make_table`.

    ``current`` and ``best`` are orders, rank after rank. ``when`` holds the starts of the current order, ``shifted``
    the changed ones. ``is_backward``, ``component_row`` and ``component_task`` are as in `StartTimes`. ``state`` holds
    the current and the best makespan, and ``random`` the state of the random numbers.
    """

    current: Array
    when: Array
    best: Array
    order: Array
    made: Array
    shifted: Array
    is_backward: Array
    component_row: Array
    component_task: Array
    state: Array
    random: Array


def make_table(blocks: Blocks, makespan: int, component_of_task: Array, random: Array) -> Table:
    """Return a table with a measured schedule."""
    order, when = blocks.order, blocks.start
    component_row = row_start(component_of_task, int(component_of_task.max()) + 1)
    component_task = np.lexsort((when, component_of_task))
    other, made, shifted = (np.zeros(len(order), np.int64) for _ in range(3))
    state = np.array([makespan, makespan], np.int64)
    return Table(
        order.copy(),
        when.copy(),
        order.copy(),
        other,
        made,
        shifted,
        np.minimum(blocks.task[:-1, PLACE] & 3, 1),
        component_row,
        component_task,
        state,
        random,
    )


@kernel
def perturb(
    graph: PackedGraph,
    reverse: PackedGraph,
    ranks: Ranks,
    mirror: Ranks,
    table: Table,
    tally: Tally,
    perturbation: Perturbation,
    terms: Terms,
) -> int:
    """Perturb and repair the schedule in the table; return the number of passes. ``terms`` limits this number.

    A move shifts starts by about ``perturbation.span``. List scheduling of the resulting order then alternates between
    the reversed graph, which puts tasks as late as possible, and the graph itself, until one result is short enough
    (forward-backward improvement of resource-constrained scheduling, Li and Willis 1992).
    """
    state, random, num_passes = table.state, table.random, terms.num_evaluations
    order, made = table.order, table.made
    used = 0
    while used < num_passes:
        if state[1] <= terms.target:
            break
        which = shift_starts(graph, table, tally, perturbation.span)
        limit = state[0] + 1 + allowance(terms, random)
        loose = max(limit, state[0] + np.int64(state[0] * LOOSE))
        lookahead = 1 + draw(random) % perturbation.lookahead
        backwards = draw(random) % 2 == 0
        makespan = ABORTED
        for turn in range(perturbation.passes):
            if used == num_passes:
                break
            bound = limit if turn == perturbation.passes - 1 else loose
            if backwards:
                turn_round(ranks.row, made, order)
                makespan = decode_by_task(reverse, mirror, order, made, lookahead, bound, None)
                turn_round(ranks.row, made, order)
                assign(made, order)
            else:
                assign(order, made)
                makespan = decode_by_task(graph, ranks, order, made, lookahead, bound, None)
            used += 1
            if makespan < limit:
                break
            backwards = not backwards
        if makespan < 0 or makespan >= limit:
            continue  # no pass shortened it enough, or no passes remain
        if makespan < state[0]:
            tally.counts[which, IMPROVED] += 1
        state[0] = makespan
        assign(table.current, made)
        if backwards:
            for number in range(len(table.when)):
                table.when[number] = makespan - mirror.start[number] - graph.task[number, DURATION]
        else:
            assign(table.when, ranks.start)
        if makespan < state[1]:
            state[1] = makespan
            assign(table.best, table.current)
    return used


@callee
def shift_starts(graph: PackedGraph, table: Table, tally: Tally, span: float) -> Any:
    """Make one move of the starts; ``table.made`` receives their order. Return the number of the move."""
    shifted = table.shifted
    assign(shifted, table.when)
    which = draw_move(tally, table.random)
    starts = StartTimes(
        table.when, shifted, table.is_backward, table.component_row, table.component_task, span, table.random
    )
    propose_starts(which, starts)
    sort_shifted(graph, table)
    return which


@callee
def sort_shifted(graph: PackedGraph, table: Table) -> None:
    """Sort the current order of every rank by ``table.shifted`` into ``table.made``."""
    made, shifted = table.made, table.shifted
    assign(made, table.current)
    for i in range(1, len(made)):
        number = made[i]
        rank = graph.task[number, PLACE] >> 2
        at = i
        # An insertion sort, since the order is nearly sorted.
        while at > 0 and shifted[made[at - 1]] > shifted[number] and graph.task[made[at - 1], PLACE] >> 2 == rank:
            made[at] = made[at - 1]
            at -= 1
        made[at] = number


@callee
def turn_round(row: Array, made: Array, order: Array) -> None:
    """Reverse an order of every rank into ``order``."""
    for r in range(len(row) - 1):
        for i in range(row[r], row[r + 1]):
            order[i] = made[row[r] + row[r + 1] - 1 - i]
