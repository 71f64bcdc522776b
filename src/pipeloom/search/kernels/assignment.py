"""Compiled joint annealing of an assignment and an order, on one list of all tasks.

The list always respects every edge. Each rank runs its tasks in list order. A move assigns a free pair to another rank,
or moves a task in the list between its predecessors and its successors.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pipeloom.compiled import allocating, callee
from pipeloom.compiled.arrays import assign
from pipeloom.compiled.random import below
from pipeloom.search.kernels.terms import Terms, allowance

Array = npt.NDArray[Any]
REJECTED = -1


class AssignmentArrays(NamedTuple):
    """Arrays that annealing reads and writes, int64.

    Attributes
    ----------
    home : array, shape (num_pairs,)
        Rank of every pair.
    listed, place : array, shape (num_tasks,)
        The list of tasks, and its inverse.
    duration : array, shape (num_tasks, num_ranks)
        Duration of every task on every rank, in ns.
    before_start, before : array
        Predecessors in compressed rows.
    delay, column : array
        Delay of every predecessor, in ns, under each of several columns, and the column for any two ranks.
    after_start, after : array
        Successors in compressed rows.
    own : array
        The free pairs, which may run on any rank.
    tasks : array, shape (num_pairs, 3)
        F, B or I, and W of every pair; -1 if it has none.
    """

    home: Array
    listed: Array
    place: Array
    pair: Array
    duration: Array
    tail: Array
    at_start: Array
    at_end: Array
    capacity: Array
    before_start: Array
    before: Array
    delay: Array
    column: Array
    after_start: Array
    after: Array
    own: Array
    tasks: Array
    end: Array
    clock: Array
    allocated: Array
    best_home: Array
    best_listed: Array


@callee
def retime(d: AssignmentArrays, limit: int) -> Any:
    """Return the makespan of the list, or `REJECTED` if it does not fit or reaches ``limit``."""
    for r in range(len(d.capacity)):
        d.clock[r] = 0
        d.allocated[r] = 0
    makespan = 0
    for i in range(len(d.listed)):
        task = d.listed[i]
        rank = d.home[d.pair[task]]
        begin = d.clock[rank]
        for e in range(d.before_start[task], d.before_start[task + 1]):
            other = d.before[e]
            delay = d.delay[e, d.column[d.home[d.pair[other]], rank]]
            begin = max(begin, d.end[other] + delay)
        end = begin + d.duration[task, rank]
        if end + d.tail[task] >= limit or d.allocated[rank] + d.at_start[task] > d.capacity[rank]:
            return REJECTED
        d.allocated[rank] += d.at_start[task] + d.at_end[task]
        # A split backward may hold more bytes for its weight gradient than it frees.
        if d.allocated[rank] > d.capacity[rank]:
            return REJECTED
        d.end[task] = end
        d.clock[rank] = end
        makespan = max(makespan, end)
    return makespan


@callee
def shift(d: AssignmentArrays, source: int, goal: int) -> None:
    """Move the task at place ``source`` to place ``goal`` and shift the tasks between by one."""
    task = d.listed[source]
    step = 1 if source < goal else -1
    for i in range(source, goal, step):
        d.listed[i] = d.listed[i + step]
        d.place[d.listed[i]] = i
    d.listed[goal] = task
    d.place[task] = goal


@callee
def wander(d: AssignmentArrays, task: int, random: Array) -> Any:
    """Move a task several places in the list, as far as edges allow; return its previous place."""
    source = d.place[task]
    length = 1 + below(random, 4)
    while below(random, 2) == 0 and length < len(d.listed):
        length *= 2
    goal = source
    if below(random, 2) == 0:
        goal = max(source - length, 0)
        for e in range(d.before_start[task], d.before_start[task + 1]):
            goal = max(goal, d.place[d.before[e]] + 1)
    else:
        goal = min(source + length, len(d.listed) - 1)
        for e in range(d.after_start[task], d.after_start[task + 1]):
            goal = min(goal, d.place[d.after[e]] - 1)
    shift(d, source, goal)
    return source


@allocating
def anneal(d: AssignmentArrays, state: Array, random: Array, terms: Terms) -> int:
    """Try changes and keep those that increase the makespan only slightly or not at all; return the number tried.

    ``state`` holds the current and the best makespan. ``best_home`` and ``best_listed`` receive the best solution.
    """
    moved, origin = np.empty(3, np.int64), np.empty(3, np.int64)
    pairs, homes = np.empty(2, np.int64), np.empty(2, np.int64)
    num_ranks = len(d.capacity)
    for n in range(terms.num_evaluations):
        if state[1] <= terms.target:
            return n
        num_moved = num_changed = 0
        kind = below(random, 8)
        if kind < 6:
            num_changed = 2 if kind < 2 else 1
            for k in range(num_changed):
                pairs[k] = d.own[below(random, len(d.own))]
                homes[k] = d.home[pairs[k]]
            if kind < 2:
                d.home[pairs[0]], d.home[pairs[1]] = homes[1], homes[0]
            elif kind < 5:
                d.home[pairs[0]] = (homes[0] + 1 + below(random, num_ranks - 1)) % num_ranks
            if kind > 2:
                for k in range(3):
                    task = d.tasks[pairs[0], k]
                    if task >= 0 and below(random, 2) == 0:
                        moved[num_moved] = task
                        origin[num_moved] = wander(d, task, random)
                        num_moved += 1
        else:
            moved[0] = below(random, len(d.listed))
            origin[0] = wander(d, moved[0], random)
            num_moved = 1
        makespan = retime(d, state[0] + 1 + allowance(terms, random))
        if makespan < 0:
            for k in range(num_moved - 1, -1, -1):
                shift(d, d.place[moved[k]], origin[k])
            for k in range(num_changed - 1, -1, -1):
                d.home[pairs[k]] = homes[k]
            continue
        state[0] = makespan
        if makespan < state[1]:
            state[1] = makespan
            assign(d.best_home, d.home)
            assign(d.best_listed, d.listed)
    return terms.num_evaluations
