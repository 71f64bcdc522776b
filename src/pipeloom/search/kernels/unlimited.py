"""The rollout where memory does not matter."""

from __future__ import annotations

from pipeloom.compiled import int64, kernel, pointer
from pipeloom.search.kernels.codes import ABORTED, ALTERNATE, BACKWARD_FIRST, NEVER, WEIGHT_AT_ONCE
from pipeloom.search.kernels.queues import (
    FREE,
    LAST_KIND,
    SLACK,
    SUMMARY,
    TIME,
    clear,
    first_key,
    first_word,
    list_tasks,
    pass_on,
    take_expected,
    take_first,
    take_late,
)
from pipeloom.search.problem import Problem
from pipeloom.search.scratch import NODE_SHIFT, NUM_URGENT, SECOND, THIRD, Scratch


@kernel
def rollout_unlimited(p: Problem, s: Scratch, policy: int, weights: int, bound: int) -> int:
    """Makespan of the schedule that the positions in ``s`` give, or `ABORTED`; see `rollout`.

    Every step starts one task at the least key: its rank is free then, and everything in its queues is ready.
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
    num_keys, num_tasks = len(s.key), len(s.run)
    rank_bits, word_shift, group_shift = s.sizes[0], s.sizes[1], s.sizes[2]
    never = NEVER >> rank_bits
    second, third = s.sizes[SECOND], s.sizes[THIRD]
    urgent = -1 if s.sizes[NUM_URGENT] >= 64 else (1 << s.sizes[NUM_URGENT]) - 1
    has_weights = p.class_start[3] > p.class_start[2]
    alternate = int64(policy == ALTERNATE)
    backward_first = int64(policy == BACKWARD_FIRST)
    makespan = 0
    for done in range(num_tasks):
        first = first_key(key, num_keys)
        now = first >> rank_bits
        rank = first & ((1 << rank_bits) - 1)
        row = rank << NODE_SHIFT
        queue = rank << (2 + word_shift)
        if node[row + TIME + 3] <= now:
            take_late(bits, node, late, rank, now, never, word_shift, group_shift)
        soonest = node[row + TIME + 3]
        forward, when = take_expected(bits, node, row, 0, queue, now, never, group_shift)
        soonest = min(soonest, when)
        backward, when = take_expected(bits, node, row, 1, queue + (1 << word_shift), now, never, group_shift)
        soonest = min(soonest, when)
        weight = 0
        if has_weights:
            weight, when = take_expected(
                bits, node, row, 2, queue + (2 << word_shift), now, never, group_shift
            )
            soonest = min(soonest, when)
        idle = now - node[row + FREE]
        if idle > 0:
            node[row + SLACK] -= idle
            if node[row + SLACK] <= 0:
                return ABORTED
        # Which class, without branches: all ones for a backward.
        last_kind = node[row + LAST_KIND]
        turn = (alternate & ~last_kind) | backward_first
        turn &= int64(backward & urgent != 0)
        chosen = int64(backward != 0) & (turn | int64(forward == 0))
        behind = -chosen
        summary = forward ^ ((forward ^ backward) & behind)
        rest = forward ^ backward ^ summary
        start = second & behind
        last_kind = chosen
        if weight != 0:
            if weights == WEIGHT_AT_ONCE or (forward | backward) == 0:
                rest = forward | backward
                summary = weight
                chosen = 2
                start = third
                last_kind = node[row + LAST_KIND]
            else:
                rest |= weight
        node[row + SUMMARY] = forward
        node[row + SUMMARY + 1] = backward
        node[row + SUMMARY + 2] = weight
        queue += chosen << word_shift
        word = first_word(bits, queue, summary, group_shift)
        position, summary = take_first(bits, queue, word, summary, group_shift)
        node[row + SUMMARY + chosen] = summary
        node[row + LAST_KIND] = last_kind
        cell = int64(at[start + position]) + rank
        end = now + record[2 * cell]
        link = record[2 * cell + 1]
        node[row + FREE] = end
        run[done] = cell
        makespan = max(makespan, end)
        # A queue that is not empty: at its end. Else when something is expected.
        soonest &= -int64((rest | summary) == 0)
        key[rank] = max(end, soonest) << rank_bits | rank
        more = 0
        delay = 0
        if link < -1:
            more = 2 * (-2 - link)
            link = extra[more]
            delay = extra[more + 1]
        while link >= 0:
            pass_on(
                bits, node, late, key, joins, where, base, record, link, end + delay, now, False, rank_bits, word_shift,
                group_shift,
            )  # fmt: skip
            if more == 0:
                break
            more += 2
            link = extra[more]
            delay = extra[more + 1]
    if makespan >= bound:
        return ABORTED
    list_tasks(p, s)
    return makespan
