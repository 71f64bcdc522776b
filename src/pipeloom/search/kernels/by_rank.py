"""List scheduling with the order of tasks on each rank as priorities: the first ready and admitted task runs first.

`decode` uses priorities of groups; here, every task has its own priority. Without a memory limit, an order that list
scheduling returned does not change. An order that was modified, or that comes from the reversed graph, is repaired: the
result satisfies the memory limit, and ready tasks fill the gaps.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pipeloom.compiled import callee, inlined, int64, kernel
from pipeloom.search.kernels.banker import bank, can_finish, grant, open_bank
from pipeloom.search.kernels.codes import ABORTED, DEADLOCK, NEVER
from pipeloom.search.kernels.queues import trailing_zeros
from pipeloom.search.packed import DURATION, FIRST_SUCCESSOR, PLACE, TAIL, PackedGraph

Array = npt.NDArray[Any]


class Ranks(NamedTuple):
    """Arrays that list scheduling writes, int64; see `make_ranks`.

    The order of rank r is at ``row[r]`` to ``row[r + 1]``. ``bits`` has one bit per place in that order, which is set
    if the task is ready. ``late`` holds the tasks that will be ready at a known time, as pairs of time and task.
    ``start`` holds the starts.
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
    demand: Array
    allocated: Array
    component_left: Array
    active: Array


def make_ranks(packed: PackedGraph) -> Ranks:
    """Return the arrays of one thread for list scheduling of one problem."""
    num_tasks, num_ranks, num_components = len(packed.waiting), len(packed.capacity), len(packed.demand)
    per_rank = np.bincount(packed.task[:-1, PLACE] >> 2, minlength=num_ranks)
    row = np.zeros(num_ranks + 1, np.int64)
    np.cumsum(per_rank, out=row[1:])
    cell = np.empty(num_tasks, np.int64)
    has = packed.number >= 0
    cell[packed.number[has]] = np.flatnonzero(has)
    most = int(per_rank.max())

    def ints(*shape: int) -> Array:
        return np.zeros(shape, np.int64)

    return Ranks(
        row=row,
        cell=cell,
        waiting=ints(num_tasks),
        start=ints(num_tasks),
        bits=ints(num_ranks, most // 64 + 1),
        num_ready=ints(num_ranks),
        late=ints(num_ranks, most, 2),
        num_late=ints(num_ranks),
        soonest=ints(num_ranks),
        key=ints(num_ranks),
        free_at=ints(num_ranks),
        blocked=ints(num_ranks),
        work_left=ints(num_ranks),
        filled=ints(num_ranks),
        ready=ints(len(packed.number)),
        free=ints(num_ranks),
        available=ints(num_ranks),
        demand=ints(num_components, num_ranks),
        allocated=ints(num_components, num_ranks),
        component_left=ints(num_components),
        active=ints(num_components),
    )


@kernel
def decode_by_rank(
    p: PackedGraph, s: Ranks, order: Array, place: Array, made: Array, lookahead: int, bound: int
) -> int:
    """Return the makespan under banker's admission, `DEADLOCK`, or `ABORTED` at ``bound``.

    Parameters
    ----------
    order, place : array, shape (num_tasks,)
        Tasks rank after rank, the most urgent first, and the inverse.
    made : array, shape (num_tasks,)
        Receives the order in which the tasks ran, rank after rank.
    lookahead : int
        Maximum number of ready tasks that may lack memory before the rank waits.
    """
    task, successor, row, waiting, start = p.task, p.successor, s.row, s.waiting, s.start
    bits, num_ready, soonest, key, free_at = s.bits, s.num_ready, s.soonest, s.key, s.free_at
    blocked, work_left, filled, free = s.blocked, s.work_left, s.filled, s.free
    k = bank(p, s)
    num_ranks, num_tasks, num_words = len(key), len(waiting), bits.shape[1]
    shift = 0
    while (1 << shift) < num_ranks:
        shift += 1
    begin_by_rank(p, s, shift)
    open_bank(k, p)
    num_active = 0
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
                # Every rank waits for memory. The banker always admits some task behind the first ones.
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
                        if k.size[2 * cell] <= free[rank]:
                            if k.size[2 * cell + 1] <= 0 or can_finish(k, cell, rank, num_active):
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
                key[rank] = NEVER if s.num_late[rank] == 0 else soonest[rank] << shift | rank
                blocked[rank] = int64(unsafe)
        begin = max(free_at[rank], start[chosen])
        end = begin + task[chosen, DURATION]
        if end + task[chosen, TAIL] >= bound or begin + work_left[rank] + p.least_tail[rank] >= bound:
            return ABORTED
        bits[rank, bit >> 6] &= ~(int64(1) << (bit & 63))
        num_ready[rank] -= 1
        work_left[rank] -= task[chosen, DURATION]
        start[chosen] = begin
        free_at[rank] = end
        cell = s.cell[chosen]
        k.ready[cell] = -1
        makespan = max(makespan, end)
        made[row[rank] + filled[rank]] = chosen
        filled[rank] += 1
        net = k.size[2 * cell + 1]
        free[rank] -= net
        num_active = grant(k, cell, rank, num_active)
        if net < 0:
            for r in range(num_ranks):
                if blocked[r] == 1:
                    blocked[r] = 0
                    key[r] = min(key[r], max(free_at[r], begin) << shift | r)
        for e in range(task[chosen, FIRST_SUCCESSOR], task[chosen + 1, FIRST_SUCCESSOR]):
            other = successor[e, 0]
            when = max(start[other], end + successor[e, 1])
            start[other] = when
            waiting[other] -= 1
            if waiting[other] == 0:
                expect(s, task[other, PLACE] >> 2, other, when, shift)
        if num_ready[rank] > 0:
            key[rank] = end << shift | rank
        elif s.num_late[rank] > 0:
            key[rank] = max(end, soonest[rank]) << shift | rank
        else:
            key[rank] = NEVER
    return makespan


@callee
def begin_by_rank(p: PackedGraph, s: Ranks, shift: int) -> None:
    """Begin list scheduling: no task has run, and tasks without predecessors are expected at once."""
    # Element by element, because whole-array assignments test shapes and take long to compile.
    for r in range(len(s.key)):
        for word in range(s.bits.shape[1]):
            s.bits[r, word] = 0
        s.num_ready[r] = 0
        s.num_late[r] = 0
        s.soonest[r] = NEVER
        s.key[r] = NEVER
        s.free_at[r] = 0
        s.blocked[r] = 0
        s.work_left[r] = p.work[r]
        s.filled[r] = 0
        s.free[r] = p.capacity[r]
    for cell in range(len(s.ready)):
        s.ready[cell] = 0
    for number in range(len(s.waiting)):
        s.waiting[number] = p.waiting[number]
        s.start[number] = 0
        if s.waiting[number] == 0:
            expect(s, p.task[number, PLACE] >> 2, number, 0, shift)


@inlined
def expect(s: Ranks, rank: int, number: int, when: int, shift: int) -> None:
    """Register a task that becomes ready at a known time."""
    last = s.num_late[rank]
    s.late[rank, last, 0] = when
    s.late[rank, last, 1] = number
    s.num_late[rank] = last + 1
    s.soonest[rank] = min(s.soonest[rank], when)
    s.key[rank] = min(s.key[rank], max(when, s.free_at[rank]) << shift | rank)


@callee
def take_ready(s: Ranks, place: Array, rank: int, now: int) -> None:
    """Mark the tasks of a rank that are ready at ``now``."""
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
