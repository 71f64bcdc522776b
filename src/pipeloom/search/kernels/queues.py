"""Ready queues, expected tasks and clocks of list scheduling. All variants share these steps.

Each rank has one queue of ready tasks per class (0 F, 1 B or I, 2 W). A queue has one bit per position, and its summary
has one bit per word, so that counting trailing zeros twice finds the first task. A task is *expected* if it will be
ready at a known time, because all its predecessors have started. Usually, each queue expects at most one task, which
has its own entry in ``node``. Further expected tasks go into the row of the rank in ``late``.

Inlined functions read ``queues``: `pointers` to the arrays of `Scratch`.
"""

from __future__ import annotations

from typing import Any

from numba.cpython.unsafe import numbers

from pipeloom.compiled import callee, inlined, int64, pointers
from pipeloom.search.kernels.codes import NEVER
from pipeloom.search.packed import JOIN_BITS, PLACE_BITS, PackedGraph
from pipeloom.search.scratch import NODE_SHIFT, Scratch

trailing_zeros: Any = numbers.trailing_zeros

FREE, LAST_KIND, SLACK, NUM_LATE = 0, 1, 2, 3
"""Entries of a rank in ``node``: the end of its last task, the kind of that task, its remaining allowed idle time, and
its number of tasks in ``late``."""
SUMMARY, TIME, MASK, WORD, BLOCKED, LATE = 4, 8, 12, 16, 20, 21
"""Further entries. By class: the summary of the queue; and the ready time, bit and word of the expected task.
``TIME + 3`` is the earliest time in ``late``. `BLOCKED`: whether the rank waits for memory that a task of another rank
may make safe to take. `LATE`: where the row of the rank in ``late`` begins."""

JOIN = (1 << JOIN_BITS) - 1
PLACE = (1 << PLACE_BITS) - 1
SEGMENT_SHIFT = JOIN_BITS + PLACE_BITS


@inlined
def enqueue(queues: Scratch, place: int, position: int) -> None:
    """Put a ready task into its queue."""
    word = position >> 6
    queues.bits[(place << queues.word_shift) + word] |= 1 << (position & 63)
    queues.node[((place >> 2) << NODE_SHIFT) + SUMMARY + (place & 3)] |= 1 << (word >> queues.group_shift)


@inlined
def first_key(queues: Scratch) -> Any:
    """Return the lowest key. It takes four keys at a time, so that comparisons are independent."""
    key = queues.key
    w, x, y, z = key[0], key[1], key[2], key[3]
    for i in range(4, queues.num_keys, 4):
        w = min(w, key[i])
        x = min(x, key[i + 1])
        y = min(y, key[i + 2])
        z = min(z, key[i + 3])
    return min(min(w, x), min(y, z))


@inlined
def take_late(queues: Scratch, rank: int, now: int) -> None:
    """Move tasks that are ready at ``now`` from ``late`` into the queues."""
    node, late = queues.node, queues.late
    row = rank << NODE_SHIFT
    first = node[row + LATE]
    soonest = queues.never
    kept = 0
    for i in range(node[row + NUM_LATE]):
        when = late[first + 2 * i]
        item = late[first + 2 * i + 1]
        if when <= now:
            enqueue(queues, item & PLACE, item >> PLACE_BITS)
        else:
            late[first + 2 * kept] = when
            late[first + 2 * kept + 1] = item
            soonest = min(soonest, when)
            kept += 1
    node[row + NUM_LATE] = kept
    node[row + TIME + 3] = soonest


@inlined
def take_expected(queues: Scratch, rank: int, which: int, now: int) -> Any:
    """Move the expected task of a class into its queue if it is ready.

    Return the summary of the queue and the ready time of the next expected task. The code has no branches, because the
    processor could not predict them.
    """
    node = queues.node
    row = rank << NODE_SHIFT
    queue = (4 * rank + which) << queues.word_shift
    time = node[row + TIME + which]
    due = (time - now - 1) >> 63  # all ones where time <= now
    mask = node[row + MASK + which]
    word = node[row + WORD + which]
    queues.bits[queue + word] |= mask & due
    summary = node[row + SUMMARY + which] | int64(mask & due != 0) << (word >> queues.group_shift)
    node[row + MASK + which] = mask & ~due
    time = time & ~due | queues.never & due
    node[row + TIME + which] = time
    return summary, time


@inlined
def expected(queues: Scratch, row: int) -> Any:
    """Return the time at which the next expected task becomes ready."""
    node = queues.node
    when = min(min(node[row + TIME], node[row + TIME + 1]), node[row + TIME + 3])
    if queues.has_weights:
        when = min(when, node[row + TIME + 2])
    return when


@inlined
def first_word(queues: Scratch, queue: int, summary: int) -> Any:
    """Return the first nonzero word of a queue, given its summary."""
    word = int64(trailing_zeros(summary)) << queues.group_shift
    while queues.bits[queue + word] == 0:
        word += 1
    return word


@inlined
def take_first(queues: Scratch, queue: int, word: int, summary: int) -> Any:
    """Remove the first task of a queue, given its word; return its position and the new summary."""
    left = queues.bits[queue + word]
    position = (word << 6) + int64(trailing_zeros(left))
    left &= left - 1
    queues.bits[queue + word] = left
    gone = int64(left == 0)
    if queues.group_shift > 0:
        for other in range(word + 1, ((word >> queues.group_shift) + 1) << queues.group_shift):
            if queues.bits[queue + other] != 0:
                gone = 0
    return position, summary ^ gone << (word >> queues.group_shift)


@inlined
def pass_on(queues: Scratch, link: int, when: int, settled: int, keep: bool) -> None:
    """Update a successor that a predecessor allows to start at ``when``; queue or expect it after the last predecessor.

    No rank reads its queues for a time before ``settled``. If ``keep``, write the ready time into ``ready``.
    """
    node, joins = queues.node, queues.joins
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
        position = int64(queues.position[pass_id])
        if keep:
            queues.ready[int64(queues.base[pass_id]) + rank] = when
        free_at = node[row + FREE]
        queues.key[rank] = min(queues.key[rank], max(free_at, when) << queues.rank_bits | rank)
        other = node[column + TIME]
        mask = node[column + MASK]
        if other > max(settled, free_at) and mask != 0:
            i = node[row + NUM_LATE]
            at = node[row + LATE] + 2 * i
            queues.late[at] = when
            queues.late[at + 1] = position << PLACE_BITS | place
            node[row + NUM_LATE] = i + 1
            node[row + TIME + 3] = min(node[row + TIME + 3], when)
        else:
            word = node[column + WORD]
            queues.bits[(place << queues.word_shift) + word] |= mask
            node[column + SUMMARY] |= int64(mask != 0) << (word >> queues.group_shift)
            node[column + TIME] = when
            node[column + WORD] = position >> 6
            node[column + MASK] = 1 << (position & 63)


@inlined
def pass_on_all(queues: Scratch, cell: int, end: int, settled: int, keep: bool) -> None:
    """Update all successors of a task that ends at ``end``; see `pass_on`."""
    link = queues.record[2 * cell + 1]
    more = 0
    delay = 0
    if link < -1:
        more = 2 * (-2 - link)
        link = queues.extra[more]
        delay = queues.extra[more + 1]
    while link >= 0:
        pass_on(queues, link, end + delay, settled, keep)
        if more == 0:
            break
        more += 2
        link = queues.extra[more]
        delay = queues.extra[more + 1]


@callee
def clear(packed: PackedGraph, scratch: Scratch, bound: int) -> bool:
    """Begin list scheduling; return whether it can meet the bound at all."""
    node, key, joins, bits, join_waiting = scratch.node, scratch.key, scratch.joins, scratch.bits, packed.join_waiting
    queues = pointers(scratch)
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
    for rank in range(len(packed.capacity)):
        row = rank << NODE_SHIFT
        node[row + LATE] = rank * scratch.late.shape[1] * 2
        slack = bound - packed.work[rank] - packed.least_tail[rank]
        hopeless |= slack <= 0
        node[row + SLACK] = slack
        node[row + LAST_KIND] = 1
        for which in range(4):
            node[row + TIME + which] = queues.never
    for i in range(len(packed.source_link)):
        link = packed.source_link[i]
        place = link & PLACE
        rank = place >> 2
        position = int64(scratch.position[link >> SEGMENT_SHIFT])
        enqueue(queues, place, position)
        key[rank] = rank
    return not hopeless


@callee
def list_tasks(packed: PackedGraph, scratch: Scratch) -> None:
    """Write the tasks of a complete run into ``scratch.sequence``."""
    run, sequence, number = scratch.run, scratch.sequence, packed.number
    for i in range(len(run)):
        sequence[i] = number[int64(run[i])]
