"""List scheduling by a priority rule: each task has a key, and a rank may wait briefly for a task with a lower key.

`pipeloom.layout.cooptimize.kernels.run` does this for equal microbatches; this module does it for any task graph.
Limits on pairs in flight and headroom for later chunks are soft here: a limit that would stall all ranks is ignored.
The banker decides what fits into memory, so nothing deadlocks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy.typing as npt

from pipeloom.compiled import callee, inlined, int64, kernel
from pipeloom.search.kernels.banker import bank, can_finish, grant, open_bank
from pipeloom.search.kernels.by_rank import Ranks, begin_by_rank, expect, take_ready
from pipeloom.search.kernels.codes import DEADLOCK, NEVER
from pipeloom.search.kernels.queues import trailing_zeros
from pipeloom.search.packed import DURATION, FIRST_SUCCESSOR, PLACE, PackedGraph

Array = npt.NDArray[Any]

REACH = 256
"""Number of ready tasks that a rank examines before it waits."""


class Priorities(NamedTuple):
    """A rule written out for the tasks and chunks of a graph, int64. Chunks are numbered by rank, in model order.

    Attributes
    ----------
    order, place : array, shape (num_tasks,)
        Tasks grouped by rank, the most urgent first, and the inverse permutation.
    key, wait : array, shape (num_tasks,)
        Sort key, lowest first; and how many ns a rank may wait for the task. Negative: the rank does not wait.
    chunk, flight, take : array, shape (num_tasks,)
        The chunk of each task; what the task adds to the number of pairs in flight and to the bytes held there.
    chunk_row : array, shape (num_ranks + 1,)
        Chunks of rank r are ``chunk_row[r]`` to ``chunk_row[r + 1]``.
    limit, later : array, shape (num_chunks,)
        Maximum number of pairs in flight, and bytes reserved for the later chunks of the rank.
    in_flight, held, headroom : array, shape (num_chunks,)
        Scratch.
    made : array, shape (num_tasks,)
        Receives the tasks in starting order.
    """

    order: Array
    place: Array
    key: Array
    wait: Array
    chunk: Array
    flight: Array
    take: Array
    chunk_row: Array
    limit: Array
    later: Array
    in_flight: Array
    held: Array
    headroom: Array
    made: Array


@inlined
def admits(w: Priorities, number: int) -> Any:
    """Return whether the rule admits a task. A task that adds nothing in flight is always admitted."""
    chunk = w.chunk[number]
    return w.flight[number] <= 0 or (w.in_flight[chunk] < w.limit[chunk] and w.take[number] <= w.headroom[chunk])


@callee
def update_headroom(p: PackedGraph, w: Priorities, rank: int) -> None:
    """Recompute how many bytes each chunk of a rank may take."""
    used = int64(0)
    for chunk in range(w.chunk_row[rank], w.chunk_row[rank + 1]):
        used += w.held[chunk]
    room = int64(NEVER)
    chunk = w.chunk_row[rank + 1] - 1
    while chunk >= w.chunk_row[rank]:
        room = min(room, p.capacity[rank] - used - w.later[chunk])
        w.headroom[chunk] = room
        used -= w.held[chunk]
        chunk -= 1


@kernel
def decode_by_rule(p: PackedGraph, s: Ranks, w: Priorities) -> int:
    """Schedule by a rule and return the makespan, or `DEADLOCK`; ``w.made`` receives the tasks in starting order."""
    task, successor, row, waiting, start = p.task, p.successor, s.row, s.waiting, s.start
    bits, num_ready, soonest, key, free_at = s.bits, s.num_ready, s.soonest, s.key, s.free_at
    blocked, free = s.blocked, s.free
    order, place, made = w.order, w.place, w.made
    k = bank(p, s)
    num_ranks, num_tasks, num_words = len(key), len(waiting), bits.shape[1]
    shift = 0
    while (1 << shift) < num_ranks:
        shift += 1
    begin_by_rank(p, s, shift)
    open_bank(k, p)
    for chunk in range(len(w.limit)):
        w.in_flight[chunk] = 0
        w.held[chunk] = 0
    for r in range(num_ranks):
        update_headroom(p, w, r)
    num_active = 0
    makespan = 0
    done = 0
    while done < num_tasks:
        first = NEVER
        for r in range(num_ranks):
            first = min(first, key[r])
        now = first >> shift
        first_rank = first & ((1 << shift) - 1)
        last_rank = first_rank
        stalled = first == NEVER
        if stalled:
            # The rule or memory stalls every rank; the banker always has a task that fits.
            first_rank = 0
            last_rank = num_ranks - 1
        elif soonest[first_rank] <= now:
            take_ready(s, place, first_rank, now)
        chosen = -1
        rank = 0
        bit = 0
        unsafe = False
        for candidate_rank in range(first_rank, last_rank + 1):
            rank = candidate_rank
            if num_ready[rank] == 0:
                continue
            seen = 0
            for word in range(num_words):
                left = bits[rank, word]
                while left != 0 and (seen < REACH or stalled):
                    bit = (word << 6) + int64(trailing_zeros(left))
                    left &= left - 1
                    seen += 1
                    number = order[row[rank] + bit]
                    cell = s.cell[number]
                    if (stalled or admits(w, number)) and k.size[2 * cell] <= free[rank]:
                        if k.size[2 * cell + 1] <= 0 or can_finish(k, cell, rank, num_active):
                            chosen = number
                            break
                        unsafe = True
                if chosen >= 0 or (seen >= REACH and not stalled):
                    break
            if chosen >= 0:
                break
        if chosen < 0 and stalled:
            return DEADLOCK
        waits = False
        if not stalled:
            best = int64(NEVER) if chosen < 0 else w.key[chosen]
            for i in range(s.num_late[rank]):
                number = s.late[rank, i, 1]
                due = s.late[rank, i, 0] - now <= w.wait[number]
                waits |= due and w.key[number] < best and admits(w, number)
        if chosen < 0 or waits:
            key[rank] = NEVER if s.num_late[rank] == 0 else soonest[rank] << shift | rank
            blocked[rank] = int64(unsafe)
            continue
        begin = max(free_at[rank], start[chosen])
        if not stalled:
            begin = max(begin, now)
        end = begin + task[chosen, DURATION]
        bits[rank, bit >> 6] &= ~(int64(1) << (bit & 63))
        num_ready[rank] -= 1
        start[chosen] = begin
        free_at[rank] = end
        cell = s.cell[chosen]
        k.ready[cell] = -1
        makespan = max(makespan, end)
        made[done] = chosen
        done += 1
        net = k.size[2 * cell + 1]
        free[rank] -= net
        num_active = grant(k, cell, rank, num_active)
        if net < 0:
            for r in range(num_ranks):
                if blocked[r] == 1:
                    blocked[r] = 0
                    key[r] = min(key[r], max(free_at[r], begin) << shift | r)
        chunk = w.chunk[chosen]
        w.in_flight[chunk] += w.flight[chosen]
        w.held[chunk] += w.take[chosen]
        update_headroom(p, w, rank)
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
