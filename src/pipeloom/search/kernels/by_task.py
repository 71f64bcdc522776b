"""List scheduling with a priority for every task: each rank runs its first ready and admitted task.

`decode` uses priorities of groups. Here, the priorities are any order of the tasks of each rank. An order that was
modified, or that comes from the reversed graph, is repaired: the result satisfies the memory limit, and ready tasks
fill the gaps. Without a memory limit, an order that list scheduling returned does not change.

A `TaskRule` also lets a rank wait for a task, and limits pairs in flight and memory. numba compiles the kernel with and
without it, so that an order without a rule does not pay for the rule.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from pipeloom.compiled import Array, callee, inlined, int64, kernel, pointers
from pipeloom.search.kernels.banker import Bank, can_finish, grant, make_bank, open_bank
from pipeloom.search.kernels.codes import ABORTED, DEADLOCK, NEVER
from pipeloom.search.kernels.queues import trailing_zeros
from pipeloom.search.packed import DURATION, FIRST_SUCCESSOR, PLACE, TAIL, PackedGraph
from pipeloom.taskgraph.rows import row_start


class Ranks(NamedTuple):
    """Arrays that list scheduling writes, int64; see `make_ranks`.

    The order of rank r is at ``row[r]`` to ``row[r + 1]``, and ``place`` is the inverse of the order. ``bits`` has one
    bit per place of the rank, which is set if the task is ready. ``late`` holds the tasks that will be ready at a known
    time, as pairs of time and task. ``start`` holds the starts.
    """

    row: Array
    place: Array
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
    bank: Bank


class TaskRule(NamedTuple):
    """A priority rule applied to the tasks and chunks of a graph, int64. Chunks are numbered by rank, in model order.

    The limits are soft: a limit that would stall all ranks is ignored. The banker decides what fits into memory, so
    nothing deadlocks.

    Attributes
    ----------
    key, wait : array, shape (num_tasks,)
        Sort key, lowest first; and how many ns a rank may wait for the task. Negative: the rank does not wait.
    chunk, flight, take : array, shape (num_tasks,)
        The chunk of each task, and the change that the task makes to its number of pairs in flight and to its held
        bytes.
    chunk_row : array, shape (num_ranks + 1,)
        Chunks of rank r are ``chunk_row[r]`` to ``chunk_row[r + 1]``.
    limit, later : array, shape (num_chunks,)
        Maximum number of pairs in flight, and bytes reserved for the later chunks of the rank.
    in_flight, held, headroom : array, shape (num_chunks,)
        Scratch.
    """

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


def make_ranks(packed: PackedGraph) -> Ranks:
    """Return the arrays of one thread for list scheduling of one problem."""
    num_tasks, num_ranks = len(packed.waiting), len(packed.capacity)
    row = row_start(packed.task[:-1, PLACE] >> 2, num_ranks)
    cell = np.empty(num_tasks, np.int64)
    has = packed.number >= 0
    cell[packed.number[has]] = np.flatnonzero(has)
    most = int(np.diff(row).max())

    def ints(*shape: int) -> Array:
        return np.zeros(shape, np.int64)

    return Ranks(
        row=row,
        place=ints(num_tasks),
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
        bank=make_bank(packed),
    )


@kernel
def decode_by_task(
    packed: PackedGraph, ranks: Ranks, order: Array, made: Array, lookahead: int, bound: int, rule: TaskRule | None
) -> int:
    """Return the makespan under banker's admission, `DEADLOCK`, or `ABORTED` at ``bound``.

    Parameters
    ----------
    order : array, shape (num_tasks,)
        Tasks rank after rank, the most urgent first.
    made : array, shape (num_tasks,)
        Receives the order in which the tasks ran, rank after rank.
    lookahead : int
        Maximum number of ready tasks that may lack memory, or that the rule may not admit, before the rank waits.
    rule : TaskRule, optional
        Must agree with the order: on each rank, keys do not decrease. Tasks may start later than the order requires,
        after a wait for another task that then did not run.
    """
    task, successor, row, waiting, start = packed.task, packed.successor, ranks.row, ranks.waiting, ranks.start
    bits, num_ready, soonest, key, free_at = ranks.bits, ranks.num_ready, ranks.soonest, ranks.key, ranks.free_at
    blocked, work_left, filled = ranks.blocked, ranks.work_left, ranks.filled
    bank = pointers(ranks.bank)
    free, size = bank.free, bank.size
    num_ranks, num_tasks, num_words = len(key), len(waiting), bits.shape[1]
    shift = 0
    while (1 << shift) < num_ranks:
        shift += 1
    begin_ranks(packed, ranks, order, shift)
    open_bank(bank, packed, True)
    if rule is not None:
        begin_rule(packed, rule)
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
        reach = lookahead
        stalled = first == NEVER
        if stalled:
            # Every rank waits for memory or for the rule. The banker always admits some task behind the first ones.
            first_rank = 0
            last_rank = num_ranks - 1
            reach = num_tasks
        elif soonest[first_rank] <= now:
            take_ready(ranks, first_rank, now)
        chosen = -1
        rank = 0
        bit = 0
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
                    cell = ranks.cell[number]
                    if (stalled or admits(rule, number)) and size[2 * cell] <= free[rank]:
                        if size[2 * cell + 1] <= 0 or can_finish(bank, cell, rank, num_active):
                            chosen = number
                            break
                        unsafe = True
                    refused += 1
                if chosen >= 0 or refused >= reach:
                    break
            if chosen >= 0:
                break
        if chosen < 0 and stalled:
            return DEADLOCK
        if chosen < 0 or (not stalled and waits(ranks, rule, rank, chosen, now)):
            key[rank] = NEVER if ranks.num_late[rank] == 0 else soonest[rank] << shift | rank
            blocked[rank] = int64(unsafe)
            continue
        begin = max(free_at[rank], start[chosen])
        if rule is not None and not stalled:
            begin = max(begin, now)
        end = begin + task[chosen, DURATION]
        if end + task[chosen, TAIL] >= bound or begin + work_left[rank] + packed.least_tail[rank] >= bound:
            return ABORTED
        bits[rank, bit >> 6] &= ~(int64(1) << (bit & 63))
        num_ready[rank] -= 1
        work_left[rank] -= task[chosen, DURATION]
        start[chosen] = begin
        free_at[rank] = end
        cell = ranks.cell[chosen]
        bank.ready[cell] = -1
        makespan = max(makespan, end)
        made[row[rank] + filled[rank]] = chosen
        filled[rank] += 1
        done += 1
        net = size[2 * cell + 1]
        free[rank] -= net
        num_active = grant(bank, cell, rank, num_active)
        if net < 0:
            for r in range(num_ranks):
                if blocked[r] == 1:
                    blocked[r] = 0
                    key[r] = min(key[r], max(free_at[r], begin) << shift | r)
        if rule is not None:
            record(packed, rule, rank, chosen)
        for e in range(task[chosen, FIRST_SUCCESSOR], task[chosen + 1, FIRST_SUCCESSOR]):
            other = successor[e, 0]
            when = max(start[other], end + successor[e, 1])
            start[other] = when
            waiting[other] -= 1
            if waiting[other] == 0:
                expect(ranks, task[other, PLACE] >> 2, other, when, shift)
        if num_ready[rank] > 0:
            key[rank] = end << shift | rank
        elif ranks.num_late[rank] > 0:
            key[rank] = max(end, soonest[rank]) << shift | rank
        else:
            key[rank] = NEVER
    return makespan


@callee
def begin_ranks(packed: PackedGraph, ranks: Ranks, order: Array, shift: int) -> None:
    """Begin list scheduling: no task has run, and tasks without predecessors are expected at once."""
    # Element by element, because whole-array assignments test shapes and take long to compile.
    for r in range(len(ranks.key)):
        for word in range(ranks.bits.shape[1]):
            ranks.bits[r, word] = 0
        ranks.num_ready[r] = 0
        ranks.num_late[r] = 0
        ranks.soonest[r] = NEVER
        ranks.key[r] = NEVER
        ranks.free_at[r] = 0
        ranks.blocked[r] = 0
        ranks.work_left[r] = packed.work[r]
        ranks.filled[r] = 0
    for i in range(len(order)):
        ranks.place[order[i]] = i
    for number in range(len(ranks.waiting)):
        ranks.waiting[number] = packed.waiting[number]
        ranks.start[number] = 0
        if ranks.waiting[number] == 0:
            expect(ranks, packed.task[number, PLACE] >> 2, number, 0, shift)


@inlined
def expect(ranks: Ranks, rank: int, number: int, when: int, shift: int) -> None:
    """Register a task that becomes ready at a known time."""
    last = ranks.num_late[rank]
    ranks.late[rank, last, 0] = when
    ranks.late[rank, last, 1] = number
    ranks.num_late[rank] = last + 1
    ranks.soonest[rank] = min(ranks.soonest[rank], when)
    ranks.key[rank] = min(ranks.key[rank], max(when, ranks.free_at[rank]) << shift | rank)


@callee
def take_ready(ranks: Ranks, rank: int, now: int) -> None:
    """Mark the tasks of a rank that are ready at ``now``."""
    soonest = NEVER
    kept = 0
    for i in range(ranks.num_late[rank]):
        when = ranks.late[rank, i, 0]
        number = ranks.late[rank, i, 1]
        if when <= now:
            bit = ranks.place[number] - ranks.row[rank]
            ranks.bits[rank, bit >> 6] |= int64(1) << (bit & 63)
            ranks.num_ready[rank] += 1
        else:
            ranks.late[rank, kept, 0] = when
            ranks.late[rank, kept, 1] = number
            soonest = min(soonest, when)
            kept += 1
    ranks.num_late[rank] = kept
    ranks.soonest[rank] = soonest


@inlined
def admits(rule: TaskRule | None, number: int) -> Any:
    """Return whether the rule admits a task. A task that adds nothing in flight is always admitted."""
    if rule is None:
        return True
    chunk = rule.chunk[number]
    fits = rule.in_flight[chunk] < rule.limit[chunk] and rule.take[number] <= rule.headroom[chunk]
    return rule.flight[number] <= 0 or fits


@inlined
def waits(ranks: Ranks, rule: TaskRule | None, rank: int, chosen: int, now: int) -> Any:
    """Return whether a rank waits for a task with a lower key rather than run the chosen one."""
    if rule is None:
        return False
    for i in range(ranks.num_late[rank]):
        number = ranks.late[rank, i, 1]
        due = ranks.late[rank, i, 0] - now <= rule.wait[number]
        if due and rule.key[number] < rule.key[chosen] and admits(rule, number):
            return True
    return False


@callee
def begin_rule(packed: PackedGraph, rule: TaskRule) -> None:
    """Reset the chunks: nothing is in flight or held."""
    for chunk in range(len(rule.limit)):
        rule.in_flight[chunk] = 0
        rule.held[chunk] = 0
    for rank in range(len(packed.capacity)):
        update_headroom(packed, rule, rank)


@callee
def record(packed: PackedGraph, rule: TaskRule, rank: int, number: int) -> None:
    """Add a task that runs to what its chunk has in flight and holds."""
    chunk = rule.chunk[number]
    rule.in_flight[chunk] += rule.flight[number]
    rule.held[chunk] += rule.take[number]
    update_headroom(packed, rule, rank)


@callee
def update_headroom(packed: PackedGraph, rule: TaskRule, rank: int) -> None:
    """Recompute how many bytes each chunk of a rank may take."""
    used = int64(0)
    for chunk in range(rule.chunk_row[rank], rule.chunk_row[rank + 1]):
        used += rule.held[chunk]
    headroom = int64(NEVER)
    chunk = rule.chunk_row[rank + 1] - 1
    while chunk >= rule.chunk_row[rank]:
        headroom = min(headroom, packed.capacity[rank] - used - rule.later[chunk])
        rule.headroom[chunk] = headroom
        used -= rule.held[chunk]
        chunk -= 1
