"""Banker's admission: a task may take memory only if every job that has begun can still finish."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from pipeloom.compiled import inlined, int64

Array = npt.NDArray[Any]


@inlined
def can_finish(
    cell: int, rank: int, num_ranks: int, num_active: int, free: Array, need: Array, held: Array, active: Array,
    available: Array, size: Array, job_of: Array, scan_start: Array, scan_cell: Array, ready: Array,
) -> bool:  # fmt: skip
    """Whether every job that has begun can still finish after a task that takes memory.

    Its own job must be able to finish with what is free; if not at once, then after other jobs have finished
    and given back what they hold. The jobs left over are then as they were before the task, with more free,
    so they need no second look. A job that has been passed is marked by a negative number in ``active``.
    """
    job = int64(job_of[cell])
    net = size[2 * cell + 1]
    first = job * num_ranks
    row = first + rank
    scanned = scan_start[row + 1] > scan_start[row]
    after = need[row] - net
    if scanned:
        after = scan_need(cell, row, size, scan_start, scan_cell, ready)
    short = after > free[rank] - net
    for r in range(num_ranks):
        short |= (r != rank) & (need[first + r] > free[r])
    if not short:
        return True
    for r in range(num_ranks):
        available[r] = free[r]
    available[rank] -= net
    moved = True
    while moved and short:
        moved = False
        for i in range(num_active):
            other = active[i]
            if other < 0 or other == job:
                continue
            fits = True
            theirs = other * num_ranks
            for r in range(num_ranks):
                fits &= need[theirs + r] <= available[r]
            if fits:
                active[i] = -1 - other
                moved = True
                short = False
                for r in range(num_ranks):
                    available[r] += held[theirs + r]
                    short |= (r != rank) & (need[first + r] > available[r])
                short |= after > available[rank]
                if not short:
                    break
    for i in range(num_active):
        if active[i] < 0:
            active[i] = -1 - active[i]
    return not short


@inlined
def scan_need(cell: int, row: int, size: Array, scan_start: Array, scan_cell: Array, ready: Array) -> int:
    """Most that a job needs on a rank above what it holds, once a task has run, along its reference order."""
    level = 0
    most = 0
    for i in range(scan_start[row], scan_start[row + 1]):
        other = scan_cell[i]
        if other == cell or ready[other] < 0:
            continue
        most = max(most, level + size[2 * other])
        level += size[2 * other + 1]
    return most


@inlined
def grant(
    cell: int, rank: int, num_ranks: int, num_active: int, need: Array, held: Array, active: Array, job_left: Array,
    job_size: Array, size: Array, job_of: Array, scan_start: Array, scan_cell: Array, ready: Array,
) -> int:  # fmt: skip
    """Book what a task takes or gives back; return how many jobs are under way then."""
    job = int64(job_of[cell])
    net = size[2 * cell + 1]
    row = job * num_ranks + rank
    left = job_left[job]
    if left == job_size[job]:
        active[num_active] = job
        num_active += 1
    job_left[job] = left - 1
    held[row] += net
    if scan_start[row + 1] > scan_start[row]:
        need[row] = scan_need(cell, row, size, scan_start, scan_cell, ready)
    elif net > 0:
        need[row] -= net
    if left == 1:
        for i in range(num_active):
            if active[i] == job:
                num_active -= 1
                active[i] = active[num_active]
                break
    return num_active
