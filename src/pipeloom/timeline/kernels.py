"""Compiled loops of the timeline: earliest starts of a fixed order, and its memory.

They visit every task and edge once and allocate nothing; the caller passes the arrays.
"""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from pipeloom.compiled import callee, kernel

Array = npt.NDArray[Any]


@kernel
def retime(
    order: Array,
    order_start: Array,
    duration: Array,
    successor_start: Array,
    successor: Array,
    successor_delay: Array,
    waiting: Array,
    start: Array,
    end: Array,
    after: Array,
    queue: Array,
) -> int:
    """Write the earliest start and end of every task; return how many tasks could run.

    ``order[order_start[r]:order_start[r+1]]`` are the tasks of rank r in running order. ``waiting`` holds the
    number of predecessors of every task and is overwritten; ``after`` (next task on the rank) and ``queue`` are
    scratch. If fewer than all tasks could run, the order deadlocks, and ``waiting`` of the others is above zero.
    """
    tail = 0
    for task in range(len(duration)):
        start[task] = 0
        after[task] = -1
    for rank in range(len(order_start) - 1):
        for i in range(order_start[rank] + 1, order_start[rank + 1]):
            after[order[i - 1]] = order[i]
            waiting[order[i]] += 1
    for i in range(len(order)):
        if waiting[order[i]] == 0:
            queue[tail] = order[i]
            tail += 1
    return run_ready(0, tail, duration, successor_start, successor, successor_delay, waiting, start, end, after, queue)


@callee
def run_ready(
    head: int,
    tail: int,
    duration: Array,
    successor_start: Array,
    successor: Array,
    successor_delay: Array,
    waiting: Array,
    start: Array,
    end: Array,
    after: Array,
    queue: Array,
) -> int:
    """Run ``queue[head:tail]`` and all tasks that become ready; return the new tail."""
    while head < tail:
        task = queue[head]
        head += 1
        finish = start[task] + duration[task]
        end[task] = finish
        for e in range(successor_start[task], successor_start[task + 1]):
            other = successor[e]
            start[other] = max(start[other], finish + successor_delay[e])
            waiting[other] -= 1
            if waiting[other] == 0:
                queue[tail] = other
                tail += 1
        other = after[task]
        if other >= 0:
            start[other] = max(start[other], finish)
            waiting[other] -= 1
            if waiting[other] == 0:
                queue[tail] = other
                tail += 1
    return tail


@kernel
def resume(
    rest: Array,
    before: Array,
    predecessor_start: Array,
    predecessor: Array,
    predecessor_delay: Array,
    duration: Array,
    successor_start: Array,
    successor: Array,
    successor_delay: Array,
    waiting: Array,
    start: Array,
    end: Array,
    after: Array,
    queue: Array,
) -> int:
    """Write start and end of ``rest``, the last tasks of ``queue``; return how many tasks have run in all.

    The others keep their times. The rest is sorted again, since new edges may reverse its order. ``before`` and
    ``after`` are the previous and the next task on the rank, or -1. ``waiting`` is scratch.
    """
    first = len(queue) - len(rest)
    for i in range(first):
        waiting[queue[i]] = -1
    for task in rest:
        waiting[task] = 0
    for task in rest:
        start[task] = 0
        other = before[task]
        if other >= 0 and waiting[other] < 0:
            start[task] = end[other]
        elif other >= 0:
            waiting[task] += 1
        for e in range(predecessor_start[task], predecessor_start[task + 1]):
            other = predecessor[e]
            if waiting[other] < 0:
                start[task] = max(start[task], end[other] + predecessor_delay[e])
            else:
                waiting[task] += 1
    tail = first
    for task in rest:
        if waiting[task] == 0:
            queue[tail] = task
            tail += 1
    return run_ready(
        first, tail, duration, successor_start, successor, successor_delay, waiting, start, end, after, queue
    )


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
