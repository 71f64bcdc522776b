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
from pipeloom.compiled.random import draw, fraction
from pipeloom.search.problem import Problem

Array = npt.NDArray[Any]
NEVER = 1 << 62
DEADLOCK, ABORTED, TOO_FULL = -1, -2, -3


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


def make_desk(problem: Problem, sequence: Array) -> Desk:
    """Arrays for polishing, with the order that a sequence of all tasks gives."""
    num_tasks, num_ranks = len(problem.waiting), len(problem.room)
    rank = problem.task[sequence, 2] >> 2
    order = np.concatenate([sequence[rank == r] for r in range(num_ranks)])
    row = np.zeros(num_ranks + 1, np.int64)
    np.cumsum(np.bincount(rank, minlength=num_ranks), out=row[1:])
    place = np.empty(num_tasks, np.int64)
    place[order] = np.arange(num_tasks)
    source = np.repeat(np.arange(num_tasks), np.diff(problem.task[:, 3]))
    by_target = np.argsort(problem.successor[:, 0], kind="stable")
    before_start = np.zeros(num_tasks + 1, np.int64)
    np.cumsum(problem.waiting, out=before_start[1:])
    start, trial, waiting, stack, critical = (np.zeros(num_tasks, np.int64) for _ in range(5))
    return Desk(
        order, row, place, start, trial, waiting, stack, before_start, source[by_target],
        problem.successor[by_target, 1].copy(), critical, order.copy(),
    )  # fmt: skip


@kernel
def retime(p: Problem, d: Desk, bound: int) -> int:
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
        end = trial[number] + task[number, 0]
        if end + task[number, 1] >= bound:
            return ABORTED
        makespan = max(makespan, end)
        for e in range(task[number, 3], task[number + 1, 3]):
            other = successor[e, 0]
            trial[other] = max(trial[other], end + successor[e, 1])
            waiting[other] -= 1
            if waiting[other] < 0:
                stack[top] = other
                top += 1
        at = place[number] + 1
        if at < row[(task[number, 2] >> 2) + 1]:
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
def fits(p: Problem, d: Desk, rank: int) -> bool:
    """Whether the order of a rank stays within its memory."""
    level = 0
    for i in range(d.row[rank], d.row[rank + 1]):
        number = d.order[i]
        if level + p.task[number, 4] > p.room[rank]:
            return False
        level += p.task[number, 5]
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
def critical_places(p: Problem, d: Desk, makespan: int, random: Array) -> int:
    """Places whose task starts when its neighbour on the rank ends, on one longest path; return how many.

    Where several longest paths meet, one is drawn.
    """
    number = -1
    seen = 0
    for other in range(len(d.order)):
        if d.start[other] + p.task[other, 0] == makespan:
            seen += 1
            if draw(random) % seen == 0:
                number = other
    count = 0
    while number >= 0:
        at = d.place[number]
        begin = d.start[number]
        after = -1
        seen = 0
        if at > d.row[p.task[number, 2] >> 2]:
            neighbour = d.order[at - 1]
            if d.start[neighbour] + p.task[neighbour, 0] == begin:
                d.critical[count] = at
                count += 1
                after = neighbour
                seen = 1
        for e in range(d.before_start[number], d.before_start[number + 1]):
            other = d.before[e]
            if d.start[other] + p.task[other, 0] + d.before_delay[e] == begin:
                seen += 1
                if draw(random) % seen == 0:
                    after = other
        number = after
    return count


@kernel
def polish(
    p: Problem, d: Desk, state: Array, random: Array, temperature: float, target: int, num_evaluations: int
) -> int:
    """Move tasks at critical places; return the number of orders tried.

    ``state`` is the current and the best makespan, as in ``climb``; ``d.best`` gets the best order.
    """
    if retime(p, d, NEVER) < 0:
        return 0
    assign(d.start, d.trial)
    count = critical_places(p, d, state[0], random)
    stale = 0
    for n in range(num_evaluations):
        if state[1] <= target:
            return n
        if stale > 4 * count + 16:
            # Another longest path, if there is one.
            count = critical_places(p, d, state[0], random)
            stale = 0
        stale += 1
        if count == 0 or draw(random) % 16 == 0:
            second = draw(random) % len(d.order)
            if second == d.row[p.task[d.order[second], 2] >> 2]:
                continue
        else:
            second = d.critical[draw(random) % count]
        rank = p.task[d.order[second], 2] >> 2
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
        limit = state[0] + 1
        if temperature > 0.0:
            uniform = fraction(random)
            limit += np.int64(-np.log(uniform) * temperature)
        makespan = retime(p, d, limit)
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
    return num_evaluations


@callee
def serial(
    p: Problem, listed: Array, made: Array, waiting: Array, ready: Array, ends: Array, bound: int
) -> int:
    """Makespan when tasks begin in the order of a list, each as soon as it can; `DEADLOCK` or `ABORTED`.

    Of the tasks not begun, the first in ``listed`` whose predecessors have begun and that fits is next;
    ``made`` gets the order that results. Unlike a rollout, it may let a rank wait for a task that comes
    later, which the best schedules sometimes need. ``ends`` is when each rank is free, then its memory.
    """
    task, successor, num_tasks, num_ranks = p.task, p.successor, len(listed), len(p.room)
    for number in range(num_tasks):
        waiting[number] = p.waiting[number]
        ready[number] = 0
    for r in range(2 * num_ranks):
        ends[r] = 0
    first = 0
    makespan = 0
    for done in range(num_tasks):
        while waiting[listed[first]] < 0:
            first += 1
        number = -1
        for i in range(first, num_tasks):
            other = listed[i]
            if waiting[other] == 0:
                rank = task[other, 2] >> 2
                if ends[num_ranks + rank] + task[other, 4] <= p.room[rank]:
                    number = other
                    break
        if number < 0:
            return DEADLOCK
        rank = task[number, 2] >> 2
        end = max(ends[rank], ready[number]) + task[number, 0]
        if end + task[number, 1] >= bound:
            return ABORTED
        ends[rank] = end
        ends[num_ranks + rank] += task[number, 5]
        waiting[number] = -1
        made[done] = number
        makespan = max(makespan, end)
        for e in range(task[number, 3], task[number + 1, 3]):
            other = successor[e, 0]
            waiting[other] -= 1
            ready[other] = max(ready[other], end + successor[e, 1])
    return makespan


@kernel
def rearrange(
    p: Problem, listed: Array, made: Array, best: Array, waiting: Array, ready: Array, ends: Array, state: Array,
    random: Array, temperature: float, target: int, num_evaluations: int,
) -> int:  # fmt: skip
    """Anneal on one list of all tasks, for small graphs; return the number of lists tried.

    A change moves one task to another place, mostly near; `serial` repairs what cannot be followed.
    """
    num_tasks = len(listed)
    for n in range(num_evaluations):
        if state[1] <= target:
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
        uniform = fraction(random)
        limit = state[0] + 1 + np.int64(-np.log(uniform) * temperature)
        makespan = serial(p, listed, made, waiting, ready, ends, limit)
        if makespan < 0:
            for i in range(goal, source, -step):
                listed[i] = listed[i - step]
            listed[source] = number
            continue
        assign(listed, made)
        state[0] = makespan
        if makespan < state[1]:
            state[1] = makespan
            assign(best, made)
    return num_evaluations
