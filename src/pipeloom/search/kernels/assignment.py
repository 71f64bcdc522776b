"""Compiled joint annealing of an assignment and an order, on one list of all tasks.

The list always respects every edge. Each rank runs its tasks in list order. A move assigns a free pair to another rank,
or moves a task in the list between its predecessors and its successors.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from pipeloom.compiled import Array, allocating, callee
from pipeloom.compiled.arrays import assign
from pipeloom.compiled.random import below
from pipeloom.search.kernels.terms import Terms, allowance

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
def retime(arrays: AssignmentArrays, limit: int) -> Any:
    """Return the makespan of the list, or `REJECTED` if it does not fit or reaches ``limit``."""
    for r in range(len(arrays.capacity)):
        arrays.clock[r] = 0
        arrays.allocated[r] = 0
    makespan = 0
    for i in range(len(arrays.listed)):
        task = arrays.listed[i]
        rank = arrays.home[arrays.pair[task]]
        begin = arrays.clock[rank]
        for e in range(arrays.before_start[task], arrays.before_start[task + 1]):
            other = arrays.before[e]
            delay = arrays.delay[e, arrays.column[arrays.home[arrays.pair[other]], rank]]
            begin = max(begin, arrays.end[other] + delay)
        end = begin + arrays.duration[task, rank]
        if end + arrays.tail[task] >= limit or arrays.allocated[rank] + arrays.at_start[task] > arrays.capacity[rank]:
            return REJECTED
        arrays.allocated[rank] += arrays.at_start[task] + arrays.at_end[task]
        # A split backward may hold more bytes for its weight gradient than it frees.
        if arrays.allocated[rank] > arrays.capacity[rank]:
            return REJECTED
        arrays.end[task] = end
        arrays.clock[rank] = end
        makespan = max(makespan, end)
    return makespan


@callee
def shift(arrays: AssignmentArrays, source: int, goal: int) -> None:
    """Move the task at place ``source`` to place ``goal`` and shift the tasks between by one."""
    task = arrays.listed[source]
    step = 1 if source < goal else -1
    for i in range(source, goal, step):
        arrays.listed[i] = arrays.listed[i + step]
        arrays.place[arrays.listed[i]] = i
    arrays.listed[goal] = task
    arrays.place[task] = goal


@callee
def wander(arrays: AssignmentArrays, task: int, random: Array) -> Any:
    """Move a task several places in the list, as far as edges allow; return its previous place."""
    source = arrays.place[task]
    length = 1 + below(random, 4)
    while below(random, 2) == 0 and length < len(arrays.listed):
        length *= 2
    goal = source
    if below(random, 2) == 0:
        goal = max(source - length, 0)
        for e in range(arrays.before_start[task], arrays.before_start[task + 1]):
            goal = max(goal, arrays.place[arrays.before[e]] + 1)
    else:
        goal = min(source + length, len(arrays.listed) - 1)
        for e in range(arrays.after_start[task], arrays.after_start[task + 1]):
            goal = min(goal, arrays.place[arrays.after[e]] - 1)
    shift(arrays, source, goal)
    return source


@allocating
def anneal(arrays: AssignmentArrays, state: Array, random: Array, terms: Terms) -> int:
    """Try changes and keep those that increase the makespan only slightly or not at all; return the number tried.

    ``state`` holds the current and the best makespan. ``best_home`` and ``best_listed`` receive the best solution.
    """
    moved, origin = np.empty(3, np.int64), np.empty(3, np.int64)
    pairs, homes = np.empty(2, np.int64), np.empty(2, np.int64)
    num_ranks = len(arrays.capacity)
    for n in range(terms.num_evaluations):
        if state[1] <= terms.target:
            return n
        num_moved = num_changed = 0
        kind = below(random, 8)
        if kind < 6:
            num_changed = 2 if kind < 2 else 1
            for k in range(num_changed):
                pairs[k] = arrays.own[below(random, len(arrays.own))]
                homes[k] = arrays.home[pairs[k]]
            if kind < 2:
                arrays.home[pairs[0]], arrays.home[pairs[1]] = homes[1], homes[0]
            elif kind < 5:
                arrays.home[pairs[0]] = (homes[0] + 1 + below(random, num_ranks - 1)) % num_ranks
            if kind > 2:
                for k in range(3):
                    task = arrays.tasks[pairs[0], k]
                    if task >= 0 and below(random, 2) == 0:
                        moved[num_moved] = task
                        origin[num_moved] = wander(arrays, task, random)
                        num_moved += 1
        else:
            moved[0] = below(random, len(arrays.listed))
            origin[0] = wander(arrays, moved[0], random)
            num_moved = 1
        makespan = retime(arrays, state[0] + 1 + allowance(terms, random))
        if makespan < 0:
            for k in range(num_moved - 1, -1, -1):
                shift(arrays, arrays.place[moved[k]], origin[k])
            for k in range(num_changed - 1, -1, -1):
                arrays.home[pairs[k]] = homes[k]
            continue
        state[0] = makespan
        if makespan < state[1]:
            state[1] = makespan
            assign(arrays.best_home, arrays.home)
            assign(arrays.best_listed, arrays.listed)
    return terms.num_evaluations
