"""The rollout of a priority rule: each task has a key, and a rank may wait a little for one of lesser key.

What `pipeloom.layout.cooptimise.kernels.run` does with microbatches that are all alike, on any task graph. Limits of
what is in flight, and room left for later chunks, are wishes here: where they hold all ranks up, they are passed over.
What fits into memory is the banker's decision, so nothing deadlocks.
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
"""Ready tasks that a rank looks at before it waits."""


class Wishes(NamedTuple):
    """What a rule says of tasks and chunks, int64; chunks have numbers here by rank, in model order.

    Attributes
    ----------
    order, place : array, shape (num_tasks,)
        Tasks rank after rank, the most urgent first, and the inverse.
    key, wait : array, shape (num_tasks,)
        Least key first; how long a rank may wait for the task, negative: not at all.
    chunk, flight, take : array, shape (num_tasks,)
        The task's chunk; what it adds to the microbatches in flight there, and to the bytes that the chunk holds.
    chunk_row : array, shape (num_ranks + 1,)
        Chunks of rank r are ``chunk_row[r]`` to ``chunk_row[r + 1]``.
    limit, later : array, shape (num_chunks,)
        Most microbatches in flight, and bytes to leave free for the later chunks of the rank.
    in_flight, held, room : array, shape (num_chunks,)
        Scratch.
    made : array, shape (num_tasks,)
        Gets the tasks as they were begun.
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
    room: Array
    made: Array


@inlined
def welcome(w: Wishes, number: int) -> Any:
    """Whether the rule lets a task begin: one that puts nothing in flight always may."""
    chunk = w.chunk[number]
    return w.flight[number] <= 0 or (w.in_flight[chunk] < w.limit[chunk] and w.take[number] <= w.room[chunk])


@callee
def leave_room(p: PackedGraph, w: Wishes, rank: int) -> None:
    """Count anew how many bytes each chunk of a rank may take."""
    used = int64(0)
    for chunk in range(w.chunk_row[rank], w.chunk_row[rank + 1]):
        used += w.held[chunk]
    room = int64(NEVER)
    chunk = w.chunk_row[rank + 1] - 1
    while chunk >= w.chunk_row[rank]:
        room = min(room, p.capacity[rank] - used - w.later[chunk])
        w.room[chunk] = room
        used -= w.held[chunk]
        chunk -= 1


@kernel
def rollout_by_rule(p: PackedGraph, s: Ranks, w: Wishes) -> int:
    """Makespan of what a rule gives, its tasks as they were begun into ``w.made``; or `DEADLOCK`."""
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
        leave_room(p, w, r)
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
        held_up = first == NEVER
        if held_up:
            # Wishes or memory hold every rank up; the banker always has a task somewhere.
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
                while left != 0 and (seen < REACH or held_up):
                    bit = (word << 6) + int64(trailing_zeros(left))
                    left &= left - 1
                    seen += 1
                    number = order[row[rank] + bit]
                    cell = s.cell[number]
                    if (held_up or welcome(w, number)) and k.size[2 * cell] <= free[rank]:
                        if k.size[2 * cell + 1] <= 0 or can_finish(k, cell, rank, num_active):
                            chosen = number
                            break
                        unsafe = True
                if chosen >= 0 or (seen >= REACH and not held_up):
                    break
            if chosen >= 0:
                break
        if chosen < 0 and held_up:
            return DEADLOCK
        patient = False
        if not held_up:
            best = int64(NEVER) if chosen < 0 else w.key[chosen]
            for i in range(s.num_late[rank]):
                number = s.late[rank, i, 1]
                near = s.late[rank, i, 0] - now <= w.wait[number]
                patient |= near and w.key[number] < best and welcome(w, number)
        if chosen < 0 or patient:
            key[rank] = NEVER if s.num_late[rank] == 0 else soonest[rank] << shift | rank
            blocked[rank] = int64(unsafe)
            continue
        begin = max(free_at[rank], start[chosen])
        if not held_up:
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
        leave_room(p, w, rank)
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
