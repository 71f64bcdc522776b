"""Ready queues, expected tasks and clocks of a rollout: the steps that all rollouts share.

A rank has a queue of ready tasks per class (0 F, 1 B or I, 2 W): a bit per position, and a summary with a bit
per word, so that the first is found by counting trailing zeros twice. A task that will be ready at a known
time, when its last predecessor ends, is *expected*. Usually there is one at most per queue, which has its own
place in ``node``; what comes beside it goes into the rank's row of ``late``.

The functions that are inlined get pointers for arrays (`pipeloom.compiled.pointer`).
"""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
from numba.cpython.unsafe import numbers

from pipeloom.compiled import callee, inlined, int64, pointer
from pipeloom.search.kernels.codes import NEVER
from pipeloom.search.problem import Problem
from pipeloom.search.records import JOIN_BITS, PLACE_BITS
from pipeloom.search.scratch import NODE_SHIFT, Scratch

Array = npt.NDArray[Any]
trailing_zeros: Any = numbers.trailing_zeros

FREE, LAST_KIND, SLACK, NUM_LATE = 0, 1, 2, 3
"""Of a rank in ``node``: when it is free, the kind it ran last, how long it may still idle, tasks in ``late``."""
SUMMARY, TIME, MASK, WORD, BLOCKED, LATE = 4, 8, 12, 16, 20, 21
"""By class: the queue's summary; when the expected task is ready, its bit and its word. ``TIME + 3`` is the
earliest time in ``late``. `BLOCKED`: the rank waits for
memory that another rank's task may make safe to take. `LATE`: where its row of ``late`` begins."""

JOIN = (1 << JOIN_BITS) - 1
PLACE = (1 << PLACE_BITS) - 1
SEGMENT_SHIFT = JOIN_BITS + PLACE_BITS


@inlined
def enqueue(bits: Array, node: Array, place: int, position: int, word_shift: int, group_shift: int) -> None:
    """Put a ready task into its queue."""
    word = position >> 6
    bits[(place << word_shift) + word] |= 1 << (position & 63)
    node[((place >> 2) << NODE_SHIFT) + SUMMARY + (place & 3)] |= 1 << (word >> group_shift)


@inlined
def first_key(key: Array, num_keys: int) -> Any:
    """Least of the keys; four at a time, so that comparisons do not wait for each other."""
    a, b, c, d = key[0], key[1], key[2], key[3]
    for i in range(4, num_keys, 4):
        a = min(a, key[i])
        b = min(b, key[i + 1])
        c = min(c, key[i + 2])
        d = min(d, key[i + 3])
    return min(min(a, b), min(c, d))


@inlined
def take_late(
    bits: Array, node: Array, late: Array, rank: int, now: int, never: int, word_shift: int, group_shift: int
) -> None:
    """Move what is ready at ``now`` from ``late`` into the queues."""
    row = rank << NODE_SHIFT
    first = node[row + LATE]
    soonest = never
    kept = 0
    for i in range(node[row + NUM_LATE]):
        when = late[first + 2 * i]
        item = late[first + 2 * i + 1]
        if when <= now:
            enqueue(bits, node, item & PLACE, item >> PLACE_BITS, word_shift, group_shift)
        else:
            late[first + 2 * kept] = when
            late[first + 2 * kept + 1] = item
            soonest = min(soonest, when)
            kept += 1
    node[row + NUM_LATE] = kept
    node[row + TIME + 3] = soonest


@inlined
def take_expected(
    bits: Array, node: Array, row: int, which: int, queue: int, now: int, never: int, group_shift: int
) -> Any:
    """Move the expected task of a class into its queue if it is ready; return the queue's summary and when the
    next one is expected. Without branches, which could not be foreseen.
    """
    time = node[row + TIME + which]
    due = (time - now - 1) >> 63  # all ones where time <= now
    mask = node[row + MASK + which]
    word = node[row + WORD + which]
    bits[queue + word] |= mask & due
    summary = node[row + SUMMARY + which] | int64(mask & due != 0) << (word >> group_shift)
    node[row + MASK + which] = mask & ~due
    time = time & ~due | never & due
    node[row + TIME + which] = time
    return summary, time


@inlined
def expected(node: Array, row: int, has_weights: bool) -> Any:
    """When the next task that is not ready yet will be."""
    when = min(min(node[row + TIME], node[row + TIME + 1]), node[row + TIME + 3])
    if has_weights:
        when = min(when, node[row + TIME + 2])
    return when


@inlined
def first_word(bits: Array, queue: int, summary: int, group_shift: int) -> Any:
    """First word of a queue that is not zero, given its summary."""
    word = int64(trailing_zeros(summary)) << group_shift
    while bits[queue + word] == 0:
        word += 1
    return word


@inlined
def take_first(bits: Array, queue: int, word: int, summary: int, group_shift: int) -> Any:
    """Take the first task out of a queue, given its word; return its position and the new summary."""
    left = bits[queue + word]
    position = (word << 6) + int64(trailing_zeros(left))
    left &= left - 1
    bits[queue + word] = left
    gone = int64(left == 0)
    if group_shift > 0:
        for other in range(word + 1, ((word >> group_shift) + 1) << group_shift):
            if bits[queue + other] != 0:
                gone = 0
    return position, summary ^ gone << (word >> group_shift)


@inlined
def pass_on(
    bits: Array, node: Array, late: Array, key: Array, joins: Array, where: Array, base: Array, ready: Array, link: int,
    when: int, settled: int, keep: bool, rank_bits: int, word_shift: int, group_shift: int,
) -> None:  # fmt: skip
    """Tell a successor that a predecessor lets it start at ``when``; once all have, queue it or expect it.

    ``where``: positions of segments. ``settled``: no rank will look at its queues for an earlier time.
    ``keep``: note in ``ready`` when it is ready.
    """
    join = (link >> PLACE_BITS) & JOIN
    left = 0
    if join > 0:
        left = joins[2 * join] - 1
        joins[2 * join] = left
        when = max(when, joins[2 * join + 1])
        joins[2 * join + 1] = when
    if left == 0:
        place = link & PLACE
        rank = place >> 2
        row = rank << NODE_SHIFT
        column = row + (place & 3)
        segment = link >> SEGMENT_SHIFT
        position = int64(where[segment])
        if keep:
            ready[int64(base[segment]) + rank] = when
        free = node[row + FREE]
        key[rank] = min(key[rank], max(free, when) << rank_bits | rank)
        other = node[column + TIME]
        mask = node[column + MASK]
        if other > max(settled, free) and mask != 0:
            i = node[row + NUM_LATE]
            at = node[row + LATE] + 2 * i
            late[at] = when
            late[at + 1] = position << PLACE_BITS | place
            node[row + NUM_LATE] = i + 1
            node[row + TIME + 3] = min(node[row + TIME + 3], when)
        else:
            word = node[column + WORD]
            bits[(place << word_shift) + word] |= mask
            node[column + SUMMARY] |= int64(mask != 0) << (word >> group_shift)
            node[column + TIME] = when
            node[column + WORD] = position >> 6
            node[column + MASK] = 1 << (position & 63)


@callee
def clear(p: Problem, s: Scratch, bound: int) -> bool:
    """Begin a rollout; whether the bound can be kept at all."""
    node, key, joins, bits, join_waiting = s.node, s.key, s.joins, s.bits, p.join_waiting
    # No time on a clock is as late; what is packed with a rank still fits.
    never = NEVER >> s.sizes[0]
    for i in range(len(bits)):
        bits[i] = 0
    for i in range(len(node)):
        node[i] = 0
    for i in range(len(key)):
        key[i] = NEVER
    for i in range(len(join_waiting)):
        joins[2 * i + 2] = join_waiting[i]
        joins[2 * i + 3] = 0
    hopeless = False
    for rank in range(len(p.room)):
        row = rank << NODE_SHIFT
        node[row + LATE] = rank * s.late.shape[1] * 2
        slack = bound - p.work[rank] - p.least_tail[rank]
        hopeless |= slack <= 0
        node[row + SLACK] = slack
        node[row + LAST_KIND] = 1
        for which in range(4):
            node[row + TIME + which] = never
    for i in range(len(p.source_link)):
        link = p.source_link[i]
        place = link & PLACE
        rank = place >> 2
        position = int64(s.position[link >> SEGMENT_SHIFT])
        enqueue(pointer(bits), pointer(node), place, position, s.sizes[1], s.sizes[2])
        key[rank] = rank
    return not hopeless


@callee
def list_tasks(p: Problem, s: Scratch) -> None:
    """Write the tasks of a finished rollout into ``s.sequence``."""
    run, sequence, number = s.run, s.sequence, p.number
    for i in range(len(run)):
        sequence[i] = number[int64(run[i])]
