"""The rollout under limited memory: what is not admitted is passed over."""

from __future__ import annotations

from pipeloom.compiled import callee, int64, pointer
from pipeloom.search.kernels.banker import can_finish, grant
from pipeloom.search.kernels.codes import (
    ABORTED,
    ALTERNATE,
    BACKWARD_FIRST,
    BANKER,
    DEADLOCK,
    FITS,
    NEVER,
    WEIGHT_AT_ONCE,
)
from pipeloom.search.kernels.queues import (
    BLOCKED,
    FREE,
    LAST_KIND,
    SLACK,
    SUMMARY,
    TIME,
    clear,
    expected,
    first_key,
    first_word,
    pass_on,
    take_expected,
    take_late,
    trailing_zeros,
)
from pipeloom.search.problem import Problem
from pipeloom.search.scratch import NODE_SHIFT, NUM_URGENT, SECOND, Scratch


@callee
def rollout_limited(
    p: Problem, s: Scratch, policy: int, weights: int, rule: int, lookahead: int, bound: int
) -> int:
    """Makespan of the schedule that the positions in ``s`` give, `DEADLOCK`, or `ABORTED`; see `rollout`.

    Of a rank's classes in turn, the first ``lookahead`` tasks are tried; a rank where none is admitted waits
    until something arrives or, where other ranks are in the way, is freed.
    """
    if not clear(p, s, bound):
        return ABORTED
    node, key, bits, late, joins = (
        pointer(s.node),
        pointer(s.key),
        pointer(s.bits),
        pointer(s.late),
        pointer(s.joins),
    )
    at, where, run = pointer(s.at), pointer(s.position), pointer(s.run)
    record, extra, base = pointer(p.record), pointer(p.extra), pointer(p.base)
    size, job_of, ready, free = pointer(p.bytes), pointer(p.job), pointer(s.ready), pointer(s.free)
    need, held, available, active = pointer(s.need), pointer(s.held), pointer(s.available), pointer(s.active)
    job_left, job_size = pointer(s.job_left), pointer(p.job_size)
    scan_start, scan_cell = pointer(p.scan_start), pointer(p.scan_cell)
    num_keys, num_tasks, num_ranks = len(s.key), len(s.run), len(s.free)
    rank_bits, word_shift, group_shift = s.sizes[0], s.sizes[1], s.sizes[2]
    never = NEVER >> rank_bits
    urgent = -1 if s.sizes[NUM_URGENT] >= 64 else (1 << s.sizes[NUM_URGENT]) - 1
    has_weights = p.class_start[3] > p.class_start[2]
    num_active = 0
    for cell in range(len(s.ready)):
        ready[cell] = 0
    for r in range(num_ranks):
        free[r] = p.room[r]
    if rule == BANKER:
        full = pointer(p.need)
        for i in range(len(p.job_size) * num_ranks):
            need[i] = full[i]
            held[i] = 0
        for job in range(len(p.job_size)):
            job_left[job] = job_size[job]
    makespan = 0
    done = 0
    while done < num_tasks:
        first = first_key(key, num_keys)
        now = first >> rank_bits
        rank = first & ((1 << rank_bits) - 1)
        first_rank = rank
        last_rank = rank
        reach = lookahead
        if first >= NEVER:
            # Memory holds every rank up. The banker always has a task somewhere, behind the first ones.
            if rule != BANKER:
                return DEADLOCK
            first_rank = 0
            last_rank = num_ranks - 1
            reach = num_tasks
        else:
            row = rank << NODE_SHIFT
            queue = rank << (2 + word_shift)
            if node[row + TIME + 3] <= now:
                take_late(bits, node, late, rank, now, never, word_shift, group_shift)
            for which in range(3 if has_weights else 2):
                summary, _ = take_expected(
                    bits, node, row, which, queue + (which << word_shift), now, never, group_shift
                )
                node[row + SUMMARY + which] = summary
        chosen = -1
        unsafe = False
        which = 0
        position = 0
        for candidate_rank in range(first_rank, last_rank + 1):
            rank = candidate_rank
            row = rank << NODE_SHIFT
            backward_first = int64(
                policy == BACKWARD_FIRST or (policy == ALTERNATE and node[row + LAST_KIND] == 0)
            )
            backward_first &= int64(node[row + SUMMARY + 1] & urgent != 0)
            for turn in range(3 if has_weights else 2):
                which = turn ^ backward_first
                if has_weights:
                    if weights == WEIGHT_AT_ONCE:
                        which = 2 if turn == 0 else (turn - 1) ^ backward_first
                    elif turn == 2:
                        which = 2
                summary = node[row + SUMMARY + which]
                if summary == 0:
                    continue
                queue = (4 * rank + which) << word_shift
                start = 0 if which == 0 else s.sizes[SECOND - 1 + which]
                word = first_word(bits, queue, summary, group_shift)
                left = bits[queue + word]
                seen = 0
                while True:
                    position = (word << 6) + int64(trailing_zeros(left))
                    cell = int64(at[start + position]) + rank
                    if size[2 * cell] <= free[rank]:
                        if rule == FITS or size[2 * cell + 1] <= 0:
                            chosen = cell
                            break
                        if can_finish(
                            cell, rank, num_ranks, num_active, free, need, held, active, available, size, job_of,
                            scan_start, scan_cell, ready,
                        ):  # fmt: skip
                            chosen = cell
                            break
                        unsafe = True
                    seen += 1
                    if seen >= reach:
                        break
                    left &= left - 1
                    while left == 0 and word + 1 < 1 << word_shift:
                        word += 1
                        left = bits[queue + word]
                    if left == 0:
                        break
                if chosen >= 0:
                    break
            if chosen >= 0:
                break
        row = rank << NODE_SHIFT
        if chosen < 0:
            if first >= NEVER:
                return DEADLOCK
            key[rank] = expected(node, row, has_weights) << rank_bits | rank
            node[row + BLOCKED] = int64(unsafe)
            continue
        begin = max(node[row + FREE], ready[chosen])
        idle = begin - node[row + FREE]
        if idle > 0:
            node[row + SLACK] -= idle
            if node[row + SLACK] <= 0:
                return ABORTED
        word = position >> 6
        queue = (4 * rank + which) << word_shift
        left = bits[queue + word] & ~(1 << (position & 63))
        bits[queue + word] = left
        if left == 0:
            gone = int64(1)
            group = word >> group_shift
            for other in range(group << group_shift, (group + 1) << group_shift):
                if bits[queue + other] != 0:
                    gone = int64(0)
            node[row + SUMMARY + which] ^= gone << group
        if which < 2:
            node[row + LAST_KIND] = which
        end = begin + record[2 * chosen]
        link = record[2 * chosen + 1]
        node[row + FREE] = end
        ready[chosen] = -1
        run[done] = chosen
        makespan = max(makespan, end)
        done += 1
        net = size[2 * chosen + 1]
        free[rank] -= net
        if rule == BANKER:
            num_active = grant(
                chosen, rank, num_ranks, num_active, need, held, active, job_left, job_size, size, job_of, scan_start,
                scan_cell, ready,
            )  # fmt: skip
            if net < 0:
                for r in range(num_ranks):
                    other_row = r << NODE_SHIFT
                    if node[other_row + BLOCKED] != 0:
                        node[other_row + BLOCKED] = 0
                        resumed = max(node[other_row + FREE], begin) << rank_bits | r
                        key[r] = min(key[r], resumed)
        more = 0
        delay = 0
        if link < -1:
            more = 2 * (-2 - link)
            link = extra[more]
            delay = extra[more + 1]
        while link >= 0:
            pass_on(
                bits, node, late, key, joins, where, base, ready, link, end + delay, -1, True, rank_bits, word_shift,
                group_shift,
            )  # fmt: skip
            if more == 0:
                break
            more += 2
            link = extra[more]
            delay = extra[more + 1]
        if node[row + SUMMARY] | node[row + SUMMARY + 1] | node[row + SUMMARY + 2]:
            key[rank] = end << rank_bits | rank
        else:
            key[rank] = max(end, expected(node, row, has_weights)) << rank_bits | rank
    return ABORTED if makespan >= bound else makespan
