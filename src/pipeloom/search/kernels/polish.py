"""Compiled local search on the tasks' order itself, rank by rank.

A move takes one task out of its rank's order and puts it in elsewhere. Only moves at critical places can
shorten the makespan at once: those that change two neighbours on a rank of which the second starts when the
first ends, on a longest path. Whether a changed order fits into memory is known from the order alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pipeloom.compiled import callee, kernel
from pipeloom.compiled.arrays import assign
from pipeloom.compiled.random import draw
from pipeloom.search.kernels.codes import ABORTED, DEADLOCK, NEVER
from pipeloom.search.kernels.terms import Terms, allowance
from pipeloom.search.packed import DURATION, FIRST_SUCCESSOR, NET, PEAK, PLACE, TAIL, PackedGraph

Array = npt.NDArray[Any]


class Desk(NamedTuple):
    """What polishing reads and writes, int64; see `make_desk`.

    ``order[row[r]:row[r + 1]]`` is the order of rank r, ``place`` the inverse. ``start`` are the starts of
    the current order, ``trial`` those of the one tried; ``before`` the predecessors in compressed rows.
    """

    order: Array
    row: Array
    place: Array
    start: Array
    trial: Array
    waiting: Array
    stack: Array
    before_start: Array
    before: Array
    before_delay: Array
    critical: Array
    best: Array


def make_desk(packed: PackedGraph, sequence: Array) -> Desk:
    """Arrays for polishing, with the order that a sequence of all tasks gives."""
    num_tasks, num_ranks = len(packed.waiting), len(packed.capacity)
    rank = packed.task[sequence, PLACE] >> 2
    order = np.concatenate([sequence[rank == r] for r in range(num_ranks)])
    row = np.zeros(num_ranks + 1, np.int64)
    np.cumsum(np.bincount(rank, minlength=num_ranks), out=row[1:])
    place = np.empty(num_tasks, np.int64)
    place[order] = np.arange(num_tasks)
    source = np.repeat(np.arange(num_tasks), np.diff(packed.task[:, FIRST_SUCCESSOR]))
    by_target = np.argsort(packed.successor[:, 0], kind="stable")
    before_start = np.zeros(num_tasks + 1, np.int64)
    np.cumsum(packed.waiting, out=before_start[1:])
    start, trial, waiting, stack, critical = (np.zeros(num_tasks, np.int64) for _ in range(5))
    return Desk(
        order,
        row,
        place,
        start,
        trial,
        waiting,
        stack,
        before_start,
        source[by_target],
        packed.successor[by_target, 1].copy(),
        critical,
        order.copy(),
    )


@kernel
def retime(p: PackedGraph, d: Desk, bound: int) -> int:
    """Makespan of ``d.order``, its starts into ``d.trial``; `DEADLOCK`; or `ABORTED` at ``bound``."""
    task, successor, order, row = p.task, p.successor, d.order, d.row
    trial, waiting, stack, place = d.trial, d.waiting, d.stack, d.place
    for number in range(len(trial)):
        waiting[number] = p.waiting[number]
        trial[number] = 0
    top = 0
    for r in range(len(row) - 1):
        if row[r] < row[r + 1]:
            first = order[row[r]]
            waiting[first] -= 1
            if waiting[first] < 0:
                stack[top] = first
                top += 1
    # Waiting counts one less than the predecessors left, once the task before on the rank is done.
    done = 0
    makespan = 0
    while top > 0:
        top -= 1
        number = stack[top]
        done += 1
        end = trial[number] + task[number, DURATION]
        if end + task[number, TAIL] >= bound:
            return ABORTED
        makespan = max(makespan, end)
        for e in range(task[number, FIRST_SUCCESSOR], task[number + 1, FIRST_SUCCESSOR]):
            other = successor[e, 0]
            trial[other] = max(trial[other], end + successor[e, 1])
            waiting[other] -= 1
            if waiting[other] < 0:
                stack[top] = other
                top += 1
        at = place[number] + 1
        if at < row[(task[number, PLACE] >> 2) + 1]:
            other = order[at]
            trial[other] = max(trial[other], end)
            waiting[other] -= 1
            if waiting[other] < 0:
                stack[top] = other
                top += 1
    if done < len(order):
        return DEADLOCK
    return makespan


@callee
def fits(p: PackedGraph, d: Desk, rank: int) -> bool:
    """Whether the order of a rank stays within its memory."""
    allocated = 0
    for i in range(d.row[rank], d.row[rank + 1]):
        number = d.order[i]
        if allocated + p.task[number, PEAK] > p.capacity[rank]:
            return False
        allocated += p.task[number, NET]
    return True


@callee
def shift(d: Desk, source: int, target: int) -> None:
    """Move the task at place ``source`` to place ``target``, those between by one."""
    number = d.order[source]
    step = 1 if source < target else -1
    i = source
    while i != target:
        d.order[i] = d.order[i + step]
        d.place[d.order[i]] = i
        i += step
    d.order[target] = number
    d.place[number] = target


@callee
def critical_places(p: PackedGraph, d: Desk, makespan: int, random: Array) -> int:
    """Places whose task starts when its neighbour on the rank ends, on one longest path; return how many.

    Where several longest paths meet, one is drawn.
    """
    number = -1
    seen = 0
    for other in range(len(d.order)):
        if d.start[other] + p.task[other, DURATION] == makespan:
            seen += 1
            if draw(random) % seen == 0:
                number = other
    count = 0
    while number >= 0:
        at = d.place[number]
        begin = d.start[number]
        after = -1
        seen = 0
        if at > d.row[p.task[number, PLACE] >> 2]:
            neighbour = d.order[at - 1]
            if d.start[neighbour] + p.task[neighbour, DURATION] == begin:
                d.critical[count] = at
                count += 1
                after = neighbour
                seen = 1
        for e in range(d.before_start[number], d.before_start[number + 1]):
            other = d.before[e]
            if d.start[other] + p.task[other, DURATION] + d.before_delay[e] == begin:
                seen += 1
                if draw(random) % seen == 0:
                    after = other
        number = after
    return count


@kernel
def polish(p: PackedGraph, d: Desk, state: Array, random: Array, terms: Terms) -> int:
    """Move tasks at critical places; return the number of orders tried.

    ``state`` is the current and the best makespan, as in ``climb``; ``d.best`` gets the best order.
    """
    if retime(p, d, NEVER) < 0:
        return 0
    assign(d.start, d.trial)
    count = critical_places(p, d, state[0], random)
    stale = 0
    for n in range(terms.num_evaluations):
        if state[1] <= terms.target:
            return n
        if stale > 4 * count + 16:
            # Another longest path, if there is one.
            count = critical_places(p, d, state[0], random)
            stale = 0
        stale += 1
        if count == 0 or draw(random) % 16 == 0:
            second = draw(random) % len(d.order)
            if second == d.row[p.task[d.order[second], PLACE] >> 2]:
                continue
        else:
            second = d.critical[draw(random) % count]
        rank = p.task[d.order[second], PLACE] >> 2
        far = draw(random) % 8
        length = 1
        while far >= 4 and length < 64:
            length += 1 + draw(random) % length
            far = draw(random) % 8
        if draw(random) % 2 == 0:
            source = second
            goal = max(second - length, d.row[rank])
        else:
            source = second - 1
            goal = min(second - 1 + length, d.row[rank + 1] - 1)
        if source == goal:
            continue
        shift(d, source, goal)
        if not fits(p, d, rank):
            shift(d, goal, source)
            continue
        makespan = retime(p, d, state[0] + 1 + allowance(terms, random))
        if makespan < 0:
            shift(d, goal, source)
            continue
        state[0] = makespan
        assign(d.start, d.trial)
        count = critical_places(p, d, makespan, random)
        stale = 0
        if makespan < state[1]:
            state[1] = makespan
            assign(d.best, d.order)
    return terms.num_evaluations


class TaskList(NamedTuple):
    """One list of all tasks under annealing, int64; see `make_list`.

    Attributes
    ----------
    listed, best : array, shape (num_tasks,)
        The current list, and the order that gave the best makespan.
    made, waiting, ready : array, shape (num_tasks,)
        Scratch: the order that results from a list, predecessors left, earliest starts.
    free_at, allocated : array, shape (num_ranks,)
        Scratch.
    """

    listed: Array
    best: Array
    made: Array
    waiting: Array
    ready: Array
    free_at: Array
    allocated: Array


def make_list(packed: PackedGraph, sequence: Array) -> TaskList:
    """A list that begins as a sequence which all ranks can follow."""
    num_tasks, num_ranks = len(packed.waiting), len(packed.capacity)
    made, waiting, ready = (np.zeros(num_tasks, np.int64) for _ in range(3))
    free_at, allocated = (np.zeros(num_ranks, np.int64) for _ in range(2))
    return TaskList(sequence.copy(), sequence.copy(), made, waiting, ready, free_at, allocated)


@callee
def serial(p: PackedGraph, t: TaskList, bound: int) -> int:
    """Makespan when tasks begin in the order of a list, each as soon as it can; `DEADLOCK` or `ABORTED`.

    Of the tasks not begun, the first in ``listed`` whose predecessors have begun and that fits is next;
    ``made`` gets the order that results. Unlike a rollout, it may let a rank wait for a task that comes
    later, which the best schedules sometimes need.
    """
    task, successor, listed, waiting, ready = p.task, p.successor, t.listed, t.waiting, t.ready
    free_at, allocated, num_tasks = t.free_at, t.allocated, len(t.listed)
    for number in range(num_tasks):
        waiting[number] = p.waiting[number]
        ready[number] = 0
    for r in range(len(free_at)):
        free_at[r] = 0
        allocated[r] = 0
    first = 0
    makespan = 0
    for done in range(num_tasks):
        while waiting[listed[first]] < 0:
            first += 1
        number = -1
        for i in range(first, num_tasks):
            other = listed[i]
            if waiting[other] == 0:
                rank = task[other, PLACE] >> 2
                if allocated[rank] + task[other, PEAK] <= p.capacity[rank]:
                    number = other
                    break
        if number < 0:
            return DEADLOCK
        rank = task[number, PLACE] >> 2
        end = max(free_at[rank], ready[number]) + task[number, DURATION]
        if end + task[number, TAIL] >= bound:
            return ABORTED
        free_at[rank] = end
        allocated[rank] += task[number, NET]
        waiting[number] = -1
        t.made[done] = number
        makespan = max(makespan, end)
        for e in range(task[number, FIRST_SUCCESSOR], task[number + 1, FIRST_SUCCESSOR]):
            other = successor[e, 0]
            waiting[other] -= 1
            ready[other] = max(ready[other], end + successor[e, 1])
    return makespan


@kernel
def rearrange(p: PackedGraph, t: TaskList, state: Array, random: Array, terms: Terms) -> int:
    """Anneal on one list of all tasks, for small graphs; return the number of lists tried.

    A change moves one task to another place, mostly near; `serial` repairs what cannot be followed.
    """
    listed, num_tasks = t.listed, len(t.listed)
    for n in range(terms.num_evaluations):
        if state[1] <= terms.target:
            return n
        source = draw(random) % num_tasks
        length = 1 + draw(random) % 4
        while draw(random) % 2 == 0 and length < num_tasks:
            length *= 2
        goal = source - length if draw(random) % 2 == 0 else source + length
        goal = min(max(goal, 0), num_tasks - 1)
        number = listed[source]
        step = 1 if source < goal else -1
        for i in range(source, goal, step):
            listed[i] = listed[i + step]
        listed[goal] = number
        makespan = serial(p, t, state[0] + 1 + allowance(terms, random))
        if makespan < 0:
            for i in range(goal, source, -step):
                listed[i] = listed[i - step]
            listed[source] = number
            continue
        assign(listed, t.made)
        state[0] = makespan
        if makespan < state[1]:
            state[1] = makespan
            assign(t.best, t.made)
    return terms.num_evaluations
