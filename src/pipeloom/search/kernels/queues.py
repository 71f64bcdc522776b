"""Ready queues, expected tasks and clocks of list scheduling: the steps that all variants share.

A rank has a queue of ready tasks per class (0 F, 1 B or I, 2 W): a bit per position, and a summary with a bit
per word, so that the first is found by counting trailing zeros twice. A task that will be ready at a known
time, when its last predecessor ends, is *expected*. Usually there is one at most per queue, which has its own
place in ``node``; what comes beside it goes into the rank's row of ``late``.

The functions that are inlined read pointers (`pipeloom.compiled.pointer`), which `queue_pointers` collects.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy.typing as npt
from numba.cpython.unsafe import numbers

from pipeloom.compiled import callee, inlined, int64, pointer
from pipeloom.search.kernels.codes import NEVER
from pipeloom.search.packed import PackedGraph
from pipeloom.search.records import JOIN_BITS, PLACE_BITS
from pipeloom.search.scratch import GROUP_SHIFT, NODE_SHIFT, NUM_URGENT, RANK_BITS, SECOND, THIRD, WORD_SHIFT, Scratch

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


class QueuePointers(NamedTuple):
    """Pointers to what list scheduling reads and writes, and the sizes of its fields; see `queue_pointers`.

    ``bits`` to ``ready`` are arrays of `Scratch` (``where`` its positions), ``record`` to ``base`` of `PackedGraph`.
    ``never`` is later than any time and fits beside a rank in a key; ``urgent`` masks the part of a backward queue's
    summary that competes with forwards.
    """

    bits: Any
    node: Any
    late: Any
    key: Any
    joins: Any
    at: Any
    where: Any
    run: Any
    ready: Any
    record: Any
    extra: Any
    base: Any
    num_keys: int
    rank_bits: int
    word_shift: int
    group_shift: int
    second: int
    third: int
    never: int
    urgent: int
    has_weights: bool


@inlined
def queue_pointers(p: PackedGraph, s: Scratch) -> Any:
    """Collect the `QueuePointers` of a run; the arrays must outlive it."""
    urgent = -1 if s.sizes[NUM_URGENT] >= 64 else (1 << s.sizes[NUM_URGENT]) - 1
    return QueuePointers(
        pointer(s.bits),
        pointer(s.node),
        pointer(s.late),
        pointer(s.key),
        pointer(s.joins),
        pointer(s.at),
        pointer(s.position),
        pointer(s.run),
        pointer(s.ready),
        pointer(p.record),
        pointer(p.extra),
        pointer(p.base),
        len(s.key),
        s.sizes[RANK_BITS],
        s.sizes[WORD_SHIFT],
        s.sizes[GROUP_SHIFT],
        s.sizes[SECOND],
        s.sizes[THIRD],
        NEVER >> s.sizes[RANK_BITS],
        urgent,
        p.class_start[3] > p.class_start[2],
    )


@inlined
def enqueue(b: QueuePointers, place: int, position: int) -> None:
    """Put a ready task into its queue."""
    word = position >> 6
    b.bits[(place << b.word_shift) + word] |= 1 << (position & 63)
    b.node[((place >> 2) << NODE_SHIFT) + SUMMARY + (place & 3)] |= 1 << (word >> b.group_shift)


@inlined
def first_key(b: QueuePointers) -> Any:
    """Return the lowest key; four at a time, so that comparisons are independent."""
    key = b.key
    w, x, y, z = key[0], key[1], key[2], key[3]
    for i in range(4, b.num_keys, 4):
        w = min(w, key[i])
        x = min(x, key[i + 1])
        y = min(y, key[i + 2])
        z = min(z, key[i + 3])
    return min(min(w, x), min(y, z))


@inlined
def take_late(b: QueuePointers, rank: int, now: int) -> None:
    """Move tasks that are ready at ``now`` from ``late`` into the queues."""
    node, late = b.node, b.late
    row = rank << NODE_SHIFT
    first = node[row + LATE]
    soonest = b.never
    kept = 0
    for i in range(node[row + NUM_LATE]):
        when = late[first + 2 * i]
        item = late[first + 2 * i + 1]
        if when <= now:
            enqueue(b, item & PLACE, item >> PLACE_BITS)
        else:
            late[first + 2 * kept] = when
            late[first + 2 * kept + 1] = item
            soonest = min(soonest, when)
            kept += 1
    node[row + NUM_LATE] = kept
    node[row + TIME + 3] = soonest


@inlined
def take_expected(b: QueuePointers, rank: int, which: int, now: int) -> Any:
    """Move the expected task of a class into its queue if it is ready; return the queue's summary and when the
    next one is expected. Without branches, which could not be foreseen.
    """
    node = b.node
    row = rank << NODE_SHIFT
    queue = (4 * rank + which) << b.word_shift
    time = node[row + TIME + which]
    due = (time - now - 1) >> 63  # all ones where time <= now
    mask = node[row + MASK + which]
    word = node[row + WORD + which]
    b.bits[queue + word] |= mask & due
    summary = node[row + SUMMARY + which] | int64(mask & due != 0) << (word >> b.group_shift)
    node[row + MASK + which] = mask & ~due
    time = time & ~due | b.never & due
    node[row + TIME + which] = time
    return summary, time


@inlined
def expected(b: QueuePointers, row: int) -> Any:
    """Return the time at which the next expected task becomes ready."""
    node = b.node
    when = min(min(node[row + TIME], node[row + TIME + 1]), node[row + TIME + 3])
    if b.has_weights:
        when = min(when, node[row + TIME + 2])
    return when


@inlined
def first_word(b: QueuePointers, queue: int, summary: int) -> Any:
    """Return the first nonzero word of a queue, given its summary."""
    word = int64(trailing_zeros(summary)) << b.group_shift
    while b.bits[queue + word] == 0:
        word += 1
    return word


@inlined
def take_first(b: QueuePointers, queue: int, word: int, summary: int) -> Any:
    """Remove the first task of a queue, given its word; return its position and the new summary."""
    left = b.bits[queue + word]
    position = (word << 6) + int64(trailing_zeros(left))
    left &= left - 1
    b.bits[queue + word] = left
    gone = int64(left == 0)
    if b.group_shift > 0:
        for other in range(word + 1, ((word >> b.group_shift) + 1) << b.group_shift):
            if b.bits[queue + other] != 0:
                gone = 0
    return position, summary ^ gone << (word >> b.group_shift)


@inlined
def pass_on(b: QueuePointers, link: int, when: int, settled: int, keep: bool) -> None:
    """Update a successor that a predecessor allows to start at ``when``; queue or expect it after the last one.

    ``settled``: no rank will look at its queues for an earlier time. ``keep``: note in ``ready`` when it is ready.
    """
    node, joins = b.node, b.joins
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
        pass_id = link >> SEGMENT_SHIFT
        position = int64(b.where[pass_id])
        if keep:
            b.ready[int64(b.base[pass_id]) + rank] = when
        free_at = node[row + FREE]
        b.key[rank] = min(b.key[rank], max(free_at, when) << b.rank_bits | rank)
        other = node[column + TIME]
        mask = node[column + MASK]
        if other > max(settled, free_at) and mask != 0:
            i = node[row + NUM_LATE]
            at = node[row + LATE] + 2 * i
            b.late[at] = when
            b.late[at + 1] = position << PLACE_BITS | place
            node[row + NUM_LATE] = i + 1
            node[row + TIME + 3] = min(node[row + TIME + 3], when)
        else:
            word = node[column + WORD]
            b.bits[(place << b.word_shift) + word] |= mask
            node[column + SUMMARY] |= int64(mask != 0) << (word >> b.group_shift)
            node[column + TIME] = when
            node[column + WORD] = position >> 6
            node[column + MASK] = 1 << (position & 63)


@inlined
def pass_on_all(b: QueuePointers, cell: int, end: int, settled: int, keep: bool) -> None:
    """Update all successors of a task that ends at ``end``; see `pass_on`."""
    link = b.record[2 * cell + 1]
    more = 0
    delay = 0
    if link < -1:
        more = 2 * (-2 - link)
        link = b.extra[more]
        delay = b.extra[more + 1]
    while link >= 0:
        pass_on(b, link, end + delay, settled, keep)
        if more == 0:
            break
        more += 2
        link = b.extra[more]
        delay = b.extra[more + 1]


@callee
def clear(p: PackedGraph, s: Scratch, bound: int) -> bool:
    """Begin list scheduling; return whether the bound can be met at all."""
    node, key, joins, bits, join_waiting = s.node, s.key, s.joins, s.bits, p.join_waiting
    # No time on a clock is as late; what is packed with a rank still fits.
    never = NEVER >> s.sizes[RANK_BITS]
    b = queue_pointers(p, s)
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
    for rank in range(len(p.capacity)):
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
        enqueue(b, place, position)
        key[rank] = rank
    return not hopeless


@callee
def list_tasks(p: PackedGraph, s: Scratch) -> None:
    """Write the tasks of a complete run into ``s.sequence``."""
    run, sequence, number = s.run, s.sequence, p.number
    for i in range(len(run)):
        sequence[i] = number[int64(run[i])]
