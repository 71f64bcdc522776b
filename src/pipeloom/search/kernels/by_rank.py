"""The rollout of an order of tasks per rank, taken as priorities: what is ready and admitted first goes first.

Whereas `rollout` knows priorities of groups, here every task has its own place in its rank's order. Without a
memory limit, an order that a rollout gave comes back as it was. One that was changed, or that stems from the
reverse of the graph, is mended: memory is respected, and gaps are filled with what is ready.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pipeloom.compiled import callee, int64, kernel, pointer
from pipeloom.search.kernels.banker import can_finish, grant
from pipeloom.search.kernels.codes import ABORTED, DEADLOCK, NEVER
from pipeloom.search.kernels.queues import trailing_zeros
from pipeloom.search.problem import Problem

Array = npt.NDArray[Any]


class Ranks(NamedTuple):
    """What the rollout writes, int64; see `make_ranks`.

    ``row``: the order of rank r stands at ``row[r]`` to ``row[r + 1]``. ``bits`` are ready tasks by place in
    that order, ``late`` those that will be ready at a known time (time and task). ``start`` are the starts.
    """

    row: Array
    cell: Array
    waiting: Array
    start: Array
    bits: Array
    num_ready: Array
    late: Array
    num_late: Array
    soonest: Array
    key: Array
    free_at: Array
    blocked: Array
    work_left: Array
    filled: Array
    ready: Array
    free: Array
    available: Array
    need: Array
    held: Array
    job_left: Array
    active: Array


def make_ranks(problem: Problem) -> Ranks:
    """Arrays for rollouts of one problem; one set per thread."""
    num_tasks, num_ranks, num_jobs = len(problem.waiting), len(problem.room), len(problem.need)
    per_rank = np.bincount(problem.task[:-1, 2] >> 2, minlength=num_ranks)
    row = np.zeros(num_ranks + 1, np.int64)
    np.cumsum(per_rank, out=row[1:])
    cell = np.empty(num_tasks, np.int64)
    has = problem.number >= 0
    cell[problem.number[has]] = np.flatnonzero(has)
    most = int(per_rank.max())

    def ints(*shape: int) -> Array:
        return np.zeros(shape, np.int64)

    return Ranks(
        row=row, cell=cell, waiting=ints(num_tasks), start=ints(num_tasks), bits=ints(num_ranks, most // 64 + 1),
        num_ready=ints(num_ranks), late=ints(num_ranks, most, 2), num_late=ints(num_ranks), soonest=ints(num_ranks),
        key=ints(num_ranks), free_at=ints(num_ranks), blocked=ints(num_ranks), work_left=ints(num_ranks),
        filled=ints(num_ranks), ready=ints(len(problem.number)), free=ints(num_ranks), available=ints(num_ranks),
        need=ints(num_jobs, num_ranks), held=ints(num_jobs, num_ranks), job_left=ints(num_jobs), active=ints(num_jobs),
    )  # fmt: skip


@kernel
def rollout_by_rank(
    p: Problem, s: Ranks, order: Array, place: Array, made: Array, lookahead: int, bound: int
) -> int:
    """Makespan under the banker's admission; `DEADLOCK`; or `ABORTED` at ``bound``.

    Parameters
    ----------
    order, place : array, shape (num_tasks,)
        Tasks rank after rank, the most urgent first, and the inverse.
    made : array, shape (num_tasks,)
        Gets the order in which they ran, likewise.
    lookahead : int
        How many ready tasks may be refused memory before the rank waits.
    """
    task, successor = p.task, p.successor
    row, waiting, start, bits, num_ready, late = s.row, s.waiting, s.start, s.bits, s.num_ready, s.late
    num_late, soonest, key, free_at, blocked = s.num_late, s.soonest, s.key, s.free_at, s.blocked
    work_left, filled, free = s.work_left, s.filled, s.free
    size, job_of, ready, available = pointer(p.bytes), pointer(p.job), pointer(s.ready), pointer(s.available)
    need, held, active, job_left = pointer(s.need), pointer(s.held), pointer(s.active), pointer(s.job_left)
    job_size, scan_start, scan_cell = pointer(p.job_size), pointer(p.scan_start), pointer(p.scan_cell)
    banked = pointer(s.free)
    num_ranks, num_tasks, num_words = len(key), len(waiting), bits.shape[1]
    shift = 0
    while (1 << shift) < num_ranks:
        shift += 1
    # One by one: an assignment to all of an array takes long to compile, for it tests shapes.
    for r in range(num_ranks):
        for word in range(num_words):
            bits[r, word] = 0
        num_ready[r] = 0
        num_late[r] = 0
        soonest[r] = NEVER
        key[r] = NEVER
        free_at[r] = 0
        blocked[r] = 0
        work_left[r] = p.work[r]
        filled[r] = 0
        free[r] = p.room[r]
    for cell in range(len(s.ready)):
        ready[cell] = 0
    full = pointer(p.need)
    for i in range(len(p.job_size) * num_ranks):
        need[i] = full[i]
        held[i] = 0
    for job in range(len(p.job_size)):
        job_left[job] = job_size[job]
    num_active = 0
    for number in range(num_tasks):
        waiting[number] = p.waiting[number]
        start[number] = 0
        if waiting[number] == 0:
            r = task[number, 2] >> 2
            late[r, num_late[r], 0] = 0
            late[r, num_late[r], 1] = number
            num_late[r] += 1
            soonest[r] = 0
            key[r] = r
    makespan = 0
    for _ in range(num_tasks):
        chosen = -1
        rank = 0
        bit = 0
        while chosen < 0:
            first = NEVER
            for r in range(num_ranks):
                first = min(first, key[r])
            now = first >> shift
            first_rank = first & ((1 << shift) - 1)
            last_rank = first_rank
            reach = lookahead
            if first == NEVER:
                # Memory holds every rank up; the banker has a task somewhere behind the first ones.
                first_rank = 0
                last_rank = num_ranks - 1
                reach = num_tasks
            elif soonest[first_rank] <= now:
                take_ready(s, place, first_rank, now)
            unsafe = False
            for candidate_rank in range(first_rank, last_rank + 1):
                rank = candidate_rank
                if num_ready[rank] == 0:
                    continue
                refused = 0
                for word in range(num_words):
                    left = bits[rank, word]
                    while left != 0 and refused < reach:
                        bit = (word << 6) + int64(trailing_zeros(left))
                        left &= left - 1
                        number = order[row[rank] + bit]
                        cell = s.cell[number]
                        if size[2 * cell] <= free[rank]:
                            if size[2 * cell + 1] <= 0 or can_finish(
                                cell, rank, num_ranks, num_active, banked, need, held, active, available, size, job_of,
                                scan_start, scan_cell, ready,
                            ):  # fmt: skip
                                chosen = number
                                break
                            unsafe = True
                        refused += 1
                    if chosen >= 0 or refused >= reach:
                        break
                if chosen >= 0:
                    break
            if chosen < 0:
                if first == NEVER:
                    return DEADLOCK
                key[rank] = NEVER if num_late[rank] == 0 else soonest[rank] << shift | rank
                blocked[rank] = int64(unsafe)
        begin = max(free_at[rank], start[chosen])
        end = begin + task[chosen, 0]
        if end + task[chosen, 1] >= bound or begin + work_left[rank] + p.least_tail[rank] >= bound:
            return ABORTED
        bits[rank, bit >> 6] &= ~(int64(1) << (bit & 63))
        num_ready[rank] -= 1
        work_left[rank] -= task[chosen, 0]
        start[chosen] = begin
        free_at[rank] = end
        cell = s.cell[chosen]
        ready[cell] = -1
        makespan = max(makespan, end)
        made[row[rank] + filled[rank]] = chosen
        filled[rank] += 1
        net = size[2 * cell + 1]
        free[rank] -= net
        num_active = grant(
            cell, rank, num_ranks, num_active, need, held, active, job_left, job_size, size, job_of, scan_start,
            scan_cell, ready,
        )  # fmt: skip
        if net < 0:
            for r in range(num_ranks):
                if blocked[r] == 1:
                    blocked[r] = 0
                    key[r] = min(key[r], max(free_at[r], begin) << shift | r)
        for e in range(task[chosen, 3], task[chosen + 1, 3]):
            other = successor[e, 0]
            when = max(start[other], end + successor[e, 1])
            start[other] = when
            waiting[other] -= 1
            if waiting[other] == 0:
                r = task[other, 2] >> 2
                late[r, num_late[r], 0] = when
                late[r, num_late[r], 1] = other
                num_late[r] += 1
                soonest[r] = min(soonest[r], when)
                key[r] = min(key[r], max(when, free_at[r]) << shift | r)
        if num_ready[rank] > 0:
            key[rank] = end << shift | rank
        elif num_late[rank] > 0:
            key[rank] = max(end, soonest[rank]) << shift | rank
        else:
            key[rank] = NEVER
    return makespan


@callee
def take_ready(s: Ranks, place: Array, rank: int, now: int) -> None:
    """Mark what is ready at ``now`` on a rank."""
    soonest = NEVER
    kept = 0
    for i in range(s.num_late[rank]):
        when = s.late[rank, i, 0]
        number = s.late[rank, i, 1]
        if when <= now:
            bit = place[number] - s.row[rank]
            s.bits[rank, bit >> 6] |= int64(1) << (bit & 63)
            s.num_ready[rank] += 1
        else:
            s.late[rank, kept, 0] = when
            s.late[rank, kept, 1] = number
            soonest = min(soonest, when)
            kept += 1
    s.num_late[rank] = kept
    s.soonest[rank] = soonest
