"""Compiled loops of the timeline: earliest starts of a fixed order, and its memory.

They visit every task and edge once and allocate nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pipeloom.compiled import Array, callee, kernel
from pipeloom.taskgraph.rows import Links


class Run(NamedTuple):
    """State of a simulation; every array has the shape (num_tasks,).

    Attributes
    ----------
    start, end : array
        Times in ns.
    queue : array
        Tasks in the order in which they ran.
    waiting : array
        Number of unfinished predecessors of each task.
    after : array
        Next task on the rank of each task, or -1.
    """

    start: Array
    end: Array
    queue: Array
    waiting: Array
    after: Array


def make_run(num_predecessors: Array) -> Run:
    """Return arrays for the simulation of tasks with these numbers of predecessors, which it overwrites."""
    start, end, queue, after = (np.empty(len(num_predecessors), np.int64) for _ in range(4))
    return Run(start, end, queue, num_predecessors, after)


@kernel
def retime(order: Array, order_start: Array, duration: Array, successors: Links, run: Run) -> int:
    """Write the earliest start and end of every task; return how many tasks could run.

    ``order[order_start[r]:order_start[r+1]]`` are the tasks of rank r in running order. If fewer than all tasks could
    run, the order deadlocks, and ``run.waiting`` of the others is above zero.
    """
    tail = 0
    for task in range(len(duration)):
        run.start[task] = 0
        run.after[task] = -1
    for rank in range(len(order_start) - 1):
        for i in range(order_start[rank] + 1, order_start[rank + 1]):
            run.after[order[i - 1]] = order[i]
            run.waiting[order[i]] += 1
    for i in range(len(order)):
        if run.waiting[order[i]] == 0:
            run.queue[tail] = order[i]
            tail += 1
    return run_ready(0, tail, duration, successors, run)


@callee
def run_ready(head: int, tail: int, duration: Array, successors: Links, run: Run) -> int:
    """Run ``run.queue[head:tail]`` and all tasks that become ready; return the new tail."""
    start, waiting, queue = run.start, run.waiting, run.queue
    while head < tail:
        task = queue[head]
        head += 1
        finish = start[task] + duration[task]
        run.end[task] = finish
        for e in range(successors.start[task], successors.start[task + 1]):
            other = successors.other[e]
            start[other] = max(start[other], finish + successors.delay[e])
            waiting[other] -= 1
            if waiting[other] == 0:
                queue[tail] = other
                tail += 1
        other = run.after[task]
        if other >= 0:
            start[other] = max(start[other], finish)
            waiting[other] -= 1
            if waiting[other] == 0:
                queue[tail] = other
                tail += 1
    return tail


@kernel
def resume(rest: Array, before: Array, predecessors: Links, duration: Array, successors: Links, run: Run) -> int:
    """Write start and end of ``rest``, the last tasks of ``run.queue``; return how many tasks have run in all.

    The others keep their times. The rest is sorted again, since new edges may reverse its order. ``before`` is the
    previous task on the rank, or -1.
    """
    start, waiting, queue = run.start, run.waiting, run.queue
    first = len(queue) - len(rest)
    for i in range(first):
        waiting[queue[i]] = -1
    for task in rest:
        waiting[task] = 0
    for task in rest:
        start[task] = 0
        other = before[task]
        if other >= 0 and waiting[other] < 0:
            start[task] = run.end[other]
        elif other >= 0:
            waiting[task] += 1
        for e in range(predecessors.start[task], predecessors.start[task + 1]):
            other = predecessors.other[e]
            if waiting[other] < 0:
                start[task] = max(start[task], run.end[other] + predecessors.delay[e])
            else:
                waiting[task] += 1
    tail = first
    for task in rest:
        if waiting[task] == 0:
            queue[tail] = task
            tail += 1
    return run_ready(first, tail, duration, successors, run)


@kernel
def peaks(order: Array, order_start: Array, at_start: Array, at_end: Array, static: Array, peak: Array) -> None:
    """Write the peak memory of every rank under a fixed order; see `pipeloom.timeline.memory_changes`.

    Memory changes only when a task starts or ends, and a rank runs one task at a time. So the peak depends only on the
    order, not on the times.
    """
    for rank in range(len(order_start) - 1):
        used = static[rank]
        peak[rank] = used
        for i in range(order_start[rank], order_start[rank + 1]):
            used += at_start[order[i]]
            peak[rank] = max(peak[rank], used)
            used += at_end[order[i]]
            peak[rank] = max(peak[rank], used)


@kernel
def sort_topologically(start: Array, successor: Array, waiting: Array, stack: Array, order: Array) -> None:
    """Write the tasks depth first into ``order``; ``waiting``, numbers of predecessors, is overwritten."""
    top = 0
    for task in range(len(waiting)):
        if waiting[task] == 0:
            stack[top] = task
            top += 1
    done = 0
    while top > 0:
        top -= 1
        task = stack[top]
        order[done] = task
        done += 1
        for e in range(start[task], start[task + 1]):
            other = successor[e]
            waiting[other] -= 1
            if waiting[other] == 0:
                stack[top] = other
                top += 1
