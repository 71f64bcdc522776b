"""Compiled loops of the search: the dual-queue rollout, and local search around it.

All kernels stand in this one file, because numba's cache sees a change only in a kernel's own file. None of
them allocates; `Scratch` holds what a rollout writes.

A rollout (`dip.txt` §5.2) goes through time. Of all ranks that could start something, it takes the one that
could start first, and there chooses between the best forward and the best backward that are ready. Where
memory is limited, a task that would not fit, or after which some begun job could no longer finish, is passed
over (`admits`).
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import numpy.typing as npt
from numba.cpython.unsafe import numbers

from pipeloom.search.problem import Problem
from pipeloom.search.scratch import Scratch

Array = npt.NDArray[Any]
kernel = numba.njit(cache=True, nogil=True, error_model="numpy")
# A call counts references to every array it is given, which takes longer than the work of these.
inlined = numba.njit(nogil=True, error_model="numpy", inline="always")
trailing_zeros: Any = numbers.trailing_zeros

NEVER = 1 << 62
DEADLOCK, ABORTED = -1, -2

# Choice of the kind when a forward and a backward are both ready.
ALTERNATE, BACKWARD_FIRST, FORWARD_FIRST = 0, 1, 2
# When a weight gradient runs: when nothing else is ready, or at once.
WEIGHT_LAST, WEIGHT_AT_ONCE = 0, 1
# Who may take memory: everyone, who fits (the papers' rule), or who leaves everyone able to finish.
UNLIMITED, FITS, BANKER = 0, 1, 2


@kernel
def expand(p: Problem, s: Scratch, order: Array) -> None:
    """Turn an order of groups (forward groups, then backward groups) into positions of segments in their class.

    A group's segments follow one another; its weight gradients take the order of their backward groups.
    """
    forward = p.class_start[0]
    backward = p.class_start[1]
    weight = p.class_start[2]
    for i in range(p.num_groups[0]):
        for k in range(p.group_start[order[i]], p.group_start[order[i] + 1]):
            s.at[forward] = p.group_segment[k]
            s.position[p.group_segment[k]] = forward
            forward += 1
    for i in range(p.num_groups[0], p.num_groups[0] + p.num_groups[1]):
        for k in range(p.group_start[order[i]], p.group_start[order[i] + 1]):
            s.at[backward] = p.group_segment[k]
            s.position[p.group_segment[k]] = backward - p.class_start[1]
            backward += 1
        for k in range(p.weight_start[order[i]], p.weight_start[order[i] + 1]):
            s.at[weight] = p.weight_segment[k]
            s.position[p.weight_segment[k]] = weight - p.class_start[2]
            weight += 1


@inlined
def safe_after(
    task: Array, number: int, rank: int, free: Array, need: Array, held: Array, active: Array, num_active: int,
    available: Array, waiting: Array, scan_start: Array, scan_task: Array,
) -> bool:  # fmt: skip
    """Whether every job that has begun can still finish after a task that takes memory.

    Its own job must be able to finish with what is free; if not at once, then after other jobs have finished
    and given back what they hold. The jobs left over are then as they were before the task, with more free,
    so they need no second look. A job that has been passed is marked by a negative number in ``active``.
    """
    net = task[number, 5]
    job = task[number, 6]
    num_ranks = len(free)
    row = job * num_ranks + rank
    after = need[job, rank] - net
    if scan_start[row + 1] > scan_start[row]:
        after = scan_need(task, number, row, waiting, scan_start, scan_task)
    short = after > free[rank] - net
    for r in range(num_ranks):
        if r != rank and need[job, r] > free[r]:
            short = True
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
            for r in range(num_ranks):
                if need[other, r] > available[r]:
                    fits = False
                    break
            if fits:
                active[i] = -1 - other
                moved = True
                for r in range(num_ranks):
                    available[r] += held[other, r]
                short = after > available[rank]
                for r in range(num_ranks):
                    if r != rank and need[job, r] > available[r]:
                        short = True
                if not short:
                    break
    for i in range(num_active):
        if active[i] < 0:
            active[i] = -1 - active[i]
    return not short


@inlined
def scan_need(task: Array, number: int, row: int, waiting: Array, scan_start: Array, scan_task: Array) -> int:
    """Most that a job needs on a rank above what it holds, once a task has run, along its reference order.

    A task that has been scheduled has ``waiting`` -1.
    """
    level = 0
    most = 0
    for i in range(scan_start[row], scan_start[row + 1]):
        other = scan_task[i]
        if other == number or waiting[other] < 0:
            continue
        most = max(most, level + task[other, 4])
        level += task[other, 5]
    return most


@kernel
def rollout(p: Problem, s: Scratch, policy: int, weights: int, rule: int, lookahead: int, bound: int) -> int:
    """Makespan of the schedule that the positions in ``s`` give; `DEADLOCK`; or `ABORTED` at ``bound``.

    ``s.sequence`` gets the tasks in the order in which they were scheduled (on each rank its running order),
    ``s.start`` their starts.
    """
    task, successor, slot, class_start = p.task, p.successor, p.slot, p.class_start
    least_tail, scan_start, scan_task, job_size = p.least_tail, p.scan_start, p.scan_task, p.job_size
    position, at, waiting, start, bits, queue = s.position, s.at, s.waiting, s.start, s.bits, s.queue
    late_time, late_task, late_count, late_first = s.late_time, s.late_task, s.late_count, s.late_first
    key, free_at, last_kind, blocked, work_left = s.key, s.free_at, s.last_kind, s.blocked, s.work_left
    free, need, held, job_left, active = s.free, s.need, s.held, s.job_left, s.active
    available, sequence = s.available, s.sequence
    num_ranks = len(key)
    num_tasks = len(waiting)
    num_words = bits.shape[1]
    shift = 0
    while (1 << shift) < num_ranks:
        shift += 1
    waiting[:] = p.waiting
    start[:] = 0
    bits[:] = 0
    queue[:, 0] = 0
    queue[:, 1] = num_words
    free_at[:] = 0
    last_kind[:] = 1
    late_count[:] = 0
    late_first[:] = NEVER
    key[:] = NEVER
    work_left[:] = p.work
    free[:] = p.room
    blocked[:] = 0
    num_active = 0
    if rule == BANKER:
        need[:] = p.need
        held[:] = 0
        job_left[:] = job_size
    for number in p.sources:
        r = task[number, 2] >> 2
        late_time[r, late_count[r]] = 0
        late_task[r, late_count[r]] = number
        late_count[r] += 1
        late_first[r] = 0
        key[r] = r
    makespan = 0
    done = 0
    while done < num_tasks:
        first = NEVER
        for r in range(num_ranks):
            first = min(first, key[r])
        now = first >> shift
        rank = first & ((1 << shift) - 1)
        first_rank = rank
        last_rank = rank
        reach = lookahead
        if first == NEVER:
            # Memory holds every rank up. The banker always has a task somewhere, behind the first ones.
            if rule != BANKER:
                return DEADLOCK
            first_rank = 0
            last_rank = num_ranks - 1
            reach = num_tasks
        elif late_first[rank] <= now:
            later = NEVER
            kept = 0
            for i in range(late_count[rank]):
                if late_time[rank, i] <= now:
                    number = late_task[rank, i]
                    place = task[number, 2]
                    bit = position[task[number, 7]]
                    bits[place, bit >> 6] |= np.uint64(1) << np.uint64(bit & 63)
                    queue[place, 0] += 1
                    queue[place, 1] = min(queue[place, 1], bit >> 6)
                else:
                    late_time[rank, kept] = late_time[rank, i]
                    late_task[rank, kept] = late_task[rank, i]
                    later = min(later, late_time[rank, i])
                    kept += 1
            late_count[rank] = kept
            late_first[rank] = later
        chosen = -1
        unsafe = False
        for rank in range(first_rank, last_rank + 1):
            backward_first = policy == BACKWARD_FIRST or (policy == ALTERNATE and last_kind[rank] == 0)
            for turn in range(3):
                if weights == WEIGHT_AT_ONCE:
                    which = 2 if turn == 0 else (turn - 1) ^ backward_first
                else:
                    which = 2 if turn == 2 else turn ^ backward_first
                place = 4 * rank + which
                if queue[place, 0] == 0:
                    continue
                word = queue[place, 1]
                while bits[place, word] == 0:
                    word += 1
                queue[place, 1] = word
                left = bits[place, word]
                seen = 0
                while seen < reach:
                    while left == 0 and word + 1 < num_words:
                        word += 1
                        left = bits[place, word]
                    if left == 0:
                        break
                    bit = (word << 6) + np.int64(trailing_zeros(left))
                    number = slot[at[class_start[which] + bit], rank]
                    if rule == UNLIMITED:
                        chosen = number
                        break
                    if task[number, 4] <= free[rank]:
                        net = task[number, 5]
                        if rule == FITS or net <= 0:
                            chosen = number
                            break
                        job = task[number, 6]
                        row = job * num_ranks + rank
                        safe = scan_start[row + 1] == scan_start[row]
                        for r in range(num_ranks):
                            safe &= need[job, r] <= free[r]
                        if safe or safe_after(
                            task, number, rank, free, need, held, active, num_active, available, waiting, scan_start,
                            scan_task,
                        ):  # fmt: skip
                            chosen = number
                            break
                        unsafe = True
                    left &= left - np.uint64(1)
                    seen += 1
                if chosen >= 0:
                    break
            if chosen >= 0:
                break
        if chosen < 0:
            if first == NEVER:
                return DEADLOCK
            # This rank waits until something arrives or, where other ranks are in the way, is freed.
            key[rank] = NEVER if late_count[rank] == 0 else late_first[rank] << shift | rank
            blocked[rank] = unsafe
            continue
        begin = max(free_at[rank], start[chosen])
        end = begin + task[chosen, 0]
        if end + task[chosen, 1] >= bound or begin + work_left[rank] + least_tail[rank] >= bound:
            return ABORTED
        bits[place, bit >> 6] &= ~(np.uint64(1) << np.uint64(bit & 63))
        queue[place, 0] -= 1
        work_left[rank] -= task[chosen, 0]
        if which < 2:
            last_kind[rank] = which
        start[chosen] = begin
        free_at[rank] = end
        waiting[chosen] = -1
        makespan = max(makespan, end)
        sequence[done] = chosen
        done += 1
        if rule != UNLIMITED:
            net = task[chosen, 5]
            free[rank] -= net
            if rule == BANKER:
                job = task[chosen, 6]
                if job_left[job] == job_size[job]:
                    active[num_active] = job
                    num_active += 1
                job_left[job] -= 1
                held[job, rank] += net
                row = job * num_ranks + rank
                if scan_start[row + 1] > scan_start[row]:
                    need[job, rank] = scan_need(task, chosen, row, waiting, scan_start, scan_task)
                elif net > 0:
                    need[job, rank] -= net
                if job_left[job] == 0:
                    for i in range(num_active):
                        if active[i] == job:
                            num_active -= 1
                            active[i] = active[num_active]
                            break
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
                place = task[other, 2]
                r = place >> 2
                if when <= free_at[r]:
                    bit = position[task[other, 7]]
                    bits[place, bit >> 6] |= np.uint64(1) << np.uint64(bit & 63)
                    queue[place, 0] += 1
                    queue[place, 1] = min(queue[place, 1], bit >> 6)
                    when = free_at[r]
                else:
                    i = late_count[r]
                    late_time[r, i] = when
                    late_task[r, i] = other
                    late_count[r] = i + 1
                    late_first[r] = min(late_first[r], when)
                key[r] = min(key[r], when << shift | r)
        if queue[4 * rank, 0] + queue[4 * rank + 1, 0] + queue[4 * rank + 2, 0] > 0:
            key[rank] = end << shift | rank
        elif late_count[rank] > 0:
            key[rank] = max(end, late_first[rank]) << shift | rank
        else:
            key[rank] = NEVER
    return makespan


@kernel
def evaluate(p: Problem, s: Scratch, order: Array, choice: Array, bound: int) -> int:
    """`expand`, then `rollout`; ``choice`` is policy, weights, rule, lookahead."""
    expand(p, s, order)
    return rollout(p, s, choice[0], choice[1], choice[2], choice[3], bound)


@kernel
def draw(random: Array) -> Any:
    """Next 62 random bits (xorshift64*, kept in ``random[0]``)."""
    x = random[0]
    x ^= x >> np.uint64(12)
    x ^= x << np.uint64(25)
    x ^= x >> np.uint64(27)
    random[0] = x
    return np.int64((x * np.uint64(2685821657736338717)) >> np.uint64(2))


@kernel
def mutate(p: Problem, order: Array, backup: Array, random: Array) -> None:
    """Swap two groups, or move a run of them; mostly not far. ``backup`` is a copy of the order."""
    num_forward = p.num_groups[0]
    low = 0
    size = num_forward
    if p.num_groups[1] > 1 and (num_forward < 2 or draw(random) % 2 == 0):
        low = num_forward
        size = p.num_groups[1]
    if size < 2:
        return
    reach = size
    kind = draw(random) % 8
    if kind < 3:
        reach = min(size, 4)
    elif kind < 6:
        reach = min(size, 4 + size // 8)
    a = draw(random) % size
    step = 1 + draw(random) % (reach - 1)
    b = a + step if draw(random) % 2 == 0 else a - step
    b = min(max(b, 0), size - 1)
    if a == b:
        b = a + 1 if a + 1 < size else a - 1
    if draw(random) % 3 == 0:
        order[low + a], order[low + b] = order[low + b], order[low + a]
        return
    run = 1
    if draw(random) % 4 == 0:
        run = 1 + draw(random) % 4
    if a < b:
        run = min(run, b - a)
        order[low + a : low + b + 1 - run] = backup[low + a + run : low + b + 1]
        order[low + b + 1 - run : low + b + 1] = backup[low + a : low + a + run]
    else:
        run = min(run, size - a)
        order[low + b + run : low + a + run] = backup[low + b : low + a]
        order[low + b : low + b + run] = backup[low + a : low + a + run]


@kernel
def mutate_microbatch(p: Problem, order: Array, backup: Array, random: Array) -> None:
    """Exchange all groups of two microbatches, or move those of one beside those of another."""
    num_forward = p.num_groups[0]
    owner = p.group_microbatch
    a = draw(random) % num_forward
    reach = 24 if draw(random) % 2 == 0 else num_forward
    b = a + draw(random) % (2 * reach + 1) - reach
    one = owner[order[a]]
    other = owner[order[min(max(b, 0), num_forward - 1)]]
    if one == other:
        return
    exchange = draw(random) % 2 == 0
    before = draw(random) % 2 == 0
    for half in range(2):
        low = 0 if half == 0 else num_forward
        high = num_forward + half * p.num_groups[1]
        j = low
        if exchange:
            for i in range(low, high):
                if owner[backup[i]] == one:
                    while j < high and owner[backup[j]] != other:
                        j += 1
                    if j == high:
                        break
                    order[i], order[j] = backup[j], backup[i]
                    j += 1
            continue
        left = 0
        for i in range(low, high):
            left += owner[backup[i]] == other
        at = low
        for i in range(low, high):
            if owner[backup[i]] == one:
                continue
            meets = owner[backup[i]] == other
            if not (meets and before):
                order[at] = backup[i]
                at += 1
            if meets:
                left -= 1
                while j < high:
                    if owner[backup[j]] == one:
                        order[at] = backup[j]
                        at += 1
                        if left > 0:
                            j += 1
                            break
                    j += 1
                if before:
                    order[at] = backup[i]
                    at += 1


@kernel
def climb(
    p: Problem,
    s: Scratch,
    order: Array,
    choice: Array,
    backup: Array,
    best_order: Array,
    best_choice: Array,
    state: Array,
    random: Array,
    temperature: float,
    target: int,
    num_evaluations: int,
    switch: int,
    whole: int,
) -> int:
    """Local search from ``order``: change it a little, keep what is not worse. Return the evaluations used.

    ``state`` is the current and the best makespan. A change is kept if it is no worse than the current one
    by more than ``temperature`` times an exponential variate, which is drawn first so that the rollout can
    stop early. ``switch``: one change in so many is of the policy instead (0: never).
    """
    num_groups = p.num_groups[0] + p.num_groups[1]
    expand(p, s, order)
    for n in range(num_evaluations):
        if state[1] <= target:
            return n
        flip = switch > 0 and draw(random) % switch == 0
        old_policy = choice[0]
        old_weights = choice[1]
        old_lookahead = choice[3]
        if flip:
            # The change before may have been taken back; then the positions are still those of the rejected order.
            expand(p, s, order)
            what = draw(random) % 4
            if what == 0 and p.class_start[3] > p.class_start[2]:
                choice[1] = 1 - choice[1]
            elif what == 1 and choice[2] != UNLIMITED:
                choice[3] = 1 + draw(random) % 4
            else:
                choice[0] = (choice[0] + 1 + draw(random) % 2) % 3
        else:
            backup[:num_groups] = order[:num_groups]
            if whole > 0 and draw(random) % 16 < whole:
                mutate_microbatch(p, order, backup, random)
            else:
                mutate(p, order, backup, random)
            expand(p, s, order)
        limit = state[0] + 1
        if temperature > 0.0:
            uniform = (draw(random) % (1 << 52) + 1) / (1 << 52)
            limit += np.int64(-np.log(uniform) * temperature)
        makespan = rollout(p, s, choice[0], choice[1], choice[2], choice[3], limit)
        if makespan >= 0:
            state[0] = makespan
            if makespan < state[1]:
                state[1] = makespan
                best_order[:num_groups] = order[:num_groups]
                best_choice[:] = choice
        elif flip:
            choice[0] = old_policy
            choice[1] = old_weights
            choice[3] = old_lookahead
        else:
            order[:num_groups] = backup[:num_groups]
    return num_evaluations
