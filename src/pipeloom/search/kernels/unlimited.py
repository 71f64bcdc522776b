"""The rollout where memory does not matter, alone or two side by side.

What a step takes is waiting for what the step before has written. Of two rollouts side by side, one waits while the
other goes on, so that both together take about one and a half times as long as one.
"""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from pipeloom.compiled import callee, inlined, int64, pointer
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
    pass_on,
    take_expected,
    take_first,
    take_late,
)
from pipeloom.search.problem import Problem
from pipeloom.search.scratch import NODE_SHIFT, NUM_URGENT, SECOND, THIRD, Scratch

Array = npt.NDArray[Any]


@inlined
def step(
    done: int, node: Array, key: Array, bits: Array, late: Array, joins: Array, at: Array, where: Array, run: Array,
    record: Array, extra: Array, base: Array, num_keys: int, rank_bits: int, word_shift: int, group_shift: int,
    second: int, third: int, urgent: int, has_weights: bool, weight_at_once: bool, alternate: int, backward_first: int,
) -> Any:  # fmt: skip
    """Start one task at the least key: its rank is free then, and everything in its queues is ready.

    Its end; `ABORTED` if the rank has been idle too long for the bound.
    """
    never = NEVER >> rank_bits
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
        weight, when = take_expected(bits, node, row, 2, queue + (2 << word_shift), now, never, group_shift)
        soonest = min(soonest, when)
    slack = node[row + SLACK] - (now - node[row + FREE])
    node[row + SLACK] = slack
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
        if weight_at_once or (forward | backward) == 0:
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
    return end if slack > 0 else ABORTED


@inlined
def sizes_of(p: Problem, s: Scratch) -> Any:
    """What `step` wants to know of the arrays: from ``num_keys`` to ``has_weights``."""
    urgent = -1 if s.sizes[NUM_URGENT] >= 64 else (1 << s.sizes[NUM_URGENT]) - 1
    return (
        len(s.key), s.sizes[0], s.sizes[1], s.sizes[2], s.sizes[SECOND], s.sizes[THIRD], urgent,
        p.class_start[3] > p.class_start[2],
    )  # fmt: skip


@callee
def finish(p: Problem, s: Scratch, policy: int, weights: int, done: int, makespan: int, bound: int) -> int:
    """Go on with a rollout of which ``done`` tasks have been started, the last of them ending at ``makespan``."""
    node, key, bits, late, joins = (
        pointer(s.node),
        pointer(s.key),
        pointer(s.bits),
        pointer(s.late),
        pointer(s.joins),
    )
    at, where, run = pointer(s.at), pointer(s.position), pointer(s.run)
    record, extra, base = pointer(p.record), pointer(p.extra), pointer(p.base)
    num_keys, rank_bits, word_shift, group_shift, second, third, urgent, has_weights = sizes_of(p, s)
    at_once = weights == WEIGHT_AT_ONCE
    alternate, backward_first = int64(policy == ALTERNATE), int64(policy == BACKWARD_FIRST)
    for i in range(done, len(s.run)):
        end = step(
            i, node, key, bits, late, joins, at, where, run, record, extra, base, num_keys, rank_bits, word_shift,
            group_shift, second, third, urgent, has_weights, at_once, alternate, backward_first,
        )  # fmt: skip
        if end < 0:
            return ABORTED
        makespan = max(makespan, end)
    return ABORTED if makespan >= bound else makespan


@callee
def rollout_unlimited(p: Problem, s: Scratch, policy: int, weights: int, bound: int) -> int:
    """Makespan of the schedule that the positions in ``s`` give, or `ABORTED`; see `rollout`."""
    if not clear(p, s, bound):
        return ABORTED
    return finish(p, s, policy, weights, 0, 0, bound)


@callee
def rollout_two(
    p: Problem, one: Scratch, two: Scratch, choices: Array, bound: int, other_bound: int
) -> tuple[int, int]:
    """`rollout_unlimited` of two orders side by side; ``choices`` are a row of policy and weights for each."""
    alive = clear(p, one, bound)
    other_alive = clear(p, two, other_bound)
    makespan = 0
    other = 0
    done = 0
    if alive and other_alive:
        node, key, bits, late, joins = (
            pointer(one.node),
            pointer(one.key),
            pointer(one.bits),
            pointer(one.late),
            pointer(one.joins),
        )
        node2, key2, bits2, late2, joins2 = (
            pointer(two.node),
            pointer(two.key),
            pointer(two.bits),
            pointer(two.late),
            pointer(two.joins),
        )
        at, where, run = pointer(one.at), pointer(one.position), pointer(one.run)
        at2, where2, run2 = pointer(two.at), pointer(two.position), pointer(two.run)
        record, extra, base = pointer(p.record), pointer(p.extra), pointer(p.base)
        num_keys, rank_bits, word_shift, group_shift, second, third, urgent, has_weights = sizes_of(p, one)
        urgent2 = sizes_of(p, two)[6]
        alternate, backward_first = (
            int64(choices[0, 0] == ALTERNATE),
            int64(choices[0, 0] == BACKWARD_FIRST),
        )
        alternate2, backward_first2 = (
            int64(choices[1, 0] == ALTERNATE),
            int64(choices[1, 0] == BACKWARD_FIRST),
        )
        at_once, at_once2 = choices[0, 1] == WEIGHT_AT_ONCE, choices[1, 1] == WEIGHT_AT_ONCE
        num_tasks = len(one.run)
        while alive and other_alive and done < num_tasks:
            end = step(
                done, node, key, bits, late, joins, at, where, run, record, extra, base, num_keys, rank_bits,
                word_shift, group_shift, second, third, urgent, has_weights, at_once, alternate, backward_first,
            )  # fmt: skip
            end2 = step(
                done, node2, key2, bits2, late2, joins2, at2, where2, run2, record, extra, base, num_keys, rank_bits,
                word_shift, group_shift, second, third, urgent2, has_weights, at_once2, alternate2, backward_first2,
            )  # fmt: skip
            alive = end >= 0
            other_alive = end2 >= 0
            makespan = max(makespan, end)
            other = max(other, end2)
            done += 1
    makespan = finish(p, one, choices[0, 0], choices[0, 1], done, makespan, bound) if alive else ABORTED
    other = finish(p, two, choices[1, 0], choices[1, 1], done, other, other_bound) if other_alive else ABORTED
    return makespan, other
