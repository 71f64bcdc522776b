"""Measurements of an order of tasks for every rank: starts, tails, held bytes, and a longest path."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pipeloom.compiled import callee, inlined, kernel, pointer
from pipeloom.compiled.random import draw
from pipeloom.search.kernels.codes import DEADLOCK
from pipeloom.search.packed import COLUMNS, DURATION, FIRST_SUCCESSOR, NET, PLACE, PackedGraph

Array = npt.NDArray[Any]


class Blocks(NamedTuple):
    """An order of tasks for every rank and its measurements, int64; see `make_blocks`.

    Attributes
    ----------
    order, place : array, shape (num_tasks,)
        Tasks rank after rank, and the inverse.
    row : array, shape (num_ranks + 1,)
        The order of rank r is at ``row[r]`` to ``row[r + 1]``.
    start, tail : array, shape (num_tasks,)
        Longest path to the start of a task, and from its end to the end of the schedule, in ns.
    released, left : array, shape (num_tasks,)
        The same without the neighbors of the task on its rank.
    level : array, shape (num_tasks,)
        Bytes that the rank holds before the task at each place.
    trial : array, shape (num_tasks,)
        Scratch: starts under a move that is being evaluated.
    sorted, turn : array, shape (num_tasks,)
        A topological order of all tasks, and the inverse.
    waiting : array, shape (num_tasks,)
        Scratch: number of remaining predecessors.
    path : array, shape (num_tasks,)
        Places along a longest path, from its end.
    window : array, shape (2,)
        Range of turns. Only tasks in it move; see `open_window`.
    begin : array, shape (num_ranks,)
        Place where the part of every rank in the window begins.
    before_start, before, before_delay : array
        Predecessors in compressed rows.
    """

    order: Array
    place: Array
    row: Array
    start: Array
    tail: Array
    released: Array
    left: Array
    level: Array
    trial: Array
    sorted: Array
    turn: Array
    waiting: Array
    path: Array
    window: Array
    begin: Array
    before_start: Array
    before: Array
    before_delay: Array


class BlockPointers(NamedTuple):
    """Pointers to the arrays of `Blocks` and of its graph; see `block_pointers`.

    A function with array arguments counts references to each array, which took two thirds of the time of tabu search.
    Rows of ``task`` have `COLUMNS` entries, and rows of ``successor`` have two.
    """

    task: Any
    successor: Any
    capacity: Any
    order: Any
    place: Any
    row: Any
    start: Any
    tail: Any
    released: Any
    left: Any
    level: Any
    trial: Any
    sorted: Any
    turn: Any
    waiting: Any
    path: Any
    window: Any
    begin: Any
    before_start: Any
    before: Any
    before_delay: Any
    num_tasks: int
    num_ranks: int


@inlined
def block_pointers(packed: PackedGraph, blocks: Blocks) -> Any:
    """Collect the `BlockPointers` of an order; the arrays must outlive it."""
    return BlockPointers(
        pointer(packed.task),
        pointer(packed.successor),
        pointer(packed.capacity),
        pointer(blocks.order),
        pointer(blocks.place),
        pointer(blocks.row),
        pointer(blocks.start),
        pointer(blocks.tail),
        pointer(blocks.released),
        pointer(blocks.left),
        pointer(blocks.level),
        pointer(blocks.trial),
        pointer(blocks.sorted),
        pointer(blocks.turn),
        pointer(blocks.waiting),
        pointer(blocks.path),
        pointer(blocks.window),
        pointer(blocks.begin),
        pointer(blocks.before_start),
        pointer(blocks.before),
        pointer(blocks.before_delay),
        len(blocks.order),
        len(blocks.begin),
    )


@inlined
def entry(pointers: BlockPointers, number: int, column: int) -> Any:
    """Return a property of a task."""
    return pointers.task[number * COLUMNS + column]


@inlined
def length_of(pointers: BlockPointers, number: int) -> Any:
    """Return the duration of a task, in ns."""
    return pointers.task[number * COLUMNS + DURATION]


@inlined
def rank_of(pointers: BlockPointers, number: int) -> Any:
    """Return the rank of a task."""
    return pointers.task[number * COLUMNS + PLACE] >> 2


def make_blocks(packed: PackedGraph, sequence: Array) -> Blocks:
    """Return arrays with the order of a sequence of all tasks, without measurements."""
    num_tasks, num_ranks = len(packed.waiting), len(packed.capacity)
    rank = packed.task[sequence, PLACE] >> 2
    order = sequence[np.argsort(rank, kind="stable")]
    row = np.zeros(num_ranks + 1, np.int64)
    np.cumsum(np.bincount(rank, minlength=num_ranks), out=row[1:])
    place = np.empty(num_tasks, np.int64)
    place[order] = np.arange(num_tasks)
    source = np.repeat(np.arange(num_tasks), np.diff(packed.task[:, FIRST_SUCCESSOR]))
    by_target = np.argsort(packed.successor[:, 0], kind="stable")
    before_start = np.zeros(num_tasks + 1, np.int64)
    np.cumsum(packed.waiting, out=before_start[1:])
    scratch = [np.zeros(num_tasks, np.int64) for _ in range(10)]
    before = source[by_target], packed.successor[by_target, 1].copy()
    window, begin = np.array([0, num_tasks], np.int64), row[:-1].copy()
    return Blocks._make([order, place, row, *scratch, window, begin, before_start, *before])


def sequence_of(packed: PackedGraph, blocks: Blocks) -> Array:
    """Return a topological sequence of a measured order. Ties keep the order of each rank."""
    ends = blocks.start + packed.task[:-1, DURATION]
    sequence: Array = np.lexsort((blocks.place, ends, blocks.start))
    return sequence


@kernel
def measure(packed: PackedGraph, blocks: Blocks) -> int:
    """Measure the order: return its makespan and write starts, tails and levels, or return `DEADLOCK`."""
    task, successor, order, row, place = packed.task, packed.successor, blocks.order, blocks.row, blocks.place
    start, released, waiting = blocks.start, blocks.released, blocks.waiting
    top = 0
    for number in range(len(start)):
        waiting[number] = packed.waiting[number]
        released[number] = 0
        start[number] = 0
    # `waiting` is one less than the number of remaining predecessors once the previous task of the rank is done.
    for r in range(len(row) - 1):
        level = 0
        for i in range(row[r], row[r + 1]):
            blocks.level[i] = level
            level += task[order[i], NET]
        if row[r] < row[r + 1]:
            first = order[row[r]]
            waiting[first] -= 1
            if waiting[first] < 0:
                blocks.sorted[top] = first
                top += 1
    done = 0
    makespan = 0
    while done < top:
        number = blocks.sorted[done]
        done += 1
        start[number] = max(start[number], released[number])
        end = start[number] + task[number, DURATION]
        makespan = max(makespan, end)
        for e in range(task[number, FIRST_SUCCESSOR], task[number + 1, FIRST_SUCCESSOR]):
            other = successor[e, 0]
            released[other] = max(released[other], end + successor[e, 1])
            waiting[other] -= 1
            if waiting[other] < 0:
                blocks.sorted[top] = other
                top += 1
        at = place[number] + 1
        if at < row[(task[number, PLACE] >> 2) + 1]:
            other = order[at]
            start[other] = end
            waiting[other] -= 1
            if waiting[other] < 0:
                blocks.sorted[top] = other
                top += 1
    if done < len(order):
        return DEADLOCK
    for i in range(done):
        blocks.turn[blocks.sorted[i]] = i
    blocks.window[0] = 0
    blocks.window[1] = done
    for r in range(len(row) - 1):
        blocks.begin[r] = row[r]
    backwards(block_pointers(packed, blocks), done, done - 1)
    return makespan


@callee
def open_window(pointers: BlockPointers, low: int, high: int) -> int:
    """Restrict moves to a range of turns; return the longest path through its tasks.

    A start depends only on earlier tasks and a tail only on later tasks. While the window is open, starts before it and
    tails after it therefore remain valid. This function updates the others as far as the window needs them.
    """
    old_low, old_high = pointers.window[0], pointers.window[1]
    pointers.window[0] = low
    pointers.window[1] = high
    forwards(pointers, old_high)
    backwards(pointers, 0, old_low - 1)
    # The window should be an interval of time. A stable sort by starts is still a topological order.
    for i in range(low + 1, high):
        number = pointers.sorted[i]
        at = i
        while at > low and pointers.start[pointers.sorted[at - 1]] > pointers.start[number]:
            pointers.sorted[at] = pointers.sorted[at - 1]
            at -= 1
        pointers.sorted[at] = number
    for r in range(pointers.num_ranks):
        pointers.begin[r] = -1
    longest = 0
    for i in range(low, high):
        number = pointers.sorted[i]
        pointers.turn[number] = i
        rank = rank_of(pointers, number)
        if pointers.begin[rank] < 0:
            pointers.begin[rank] = pointers.place[number]
        longest = max(longest, pointers.start[number] + length_of(pointers, number) + pointers.tail[number])
    return int(longest)


@callee
def replace_window(pointers: BlockPointers, sequence: Array) -> int:
    """Reorder the window by the turns of a sequence; return the longest path through it."""
    low, high = pointers.window[0], pointers.window[1]
    for i in range(low, high):
        number = sequence[i]
        rank = rank_of(pointers, number)
        at = pointers.begin[rank]
        pointers.begin[rank] += 1
        pointers.sorted[i] = number
        pointers.turn[number] = i
        pointers.order[at] = number
        pointers.place[number] = at
        if at + 1 < pointers.row[rank + 1]:
            pointers.level[at + 1] = pointers.level[at] + entry(pointers, number, NET)
    for i in range(low, high):
        pointers.begin[rank_of(pointers, sequence[i])] -= 1
    backwards(pointers, low, high - 1)
    return int(forwards(pointers, low))


@callee
def backwards(pointers: BlockPointers, first: int, last: int) -> int:
    """Compute tails of the window's tasks up to ``last``; return the longest path through those before ``first``."""
    order, row, place = pointers.order, pointers.row, pointers.place
    makespan = 0
    for i in range(last, pointers.window[0] - 1, -1):
        number = pointers.sorted[i]
        after = 0
        for e in range(entry(pointers, number, FIRST_SUCCESSOR), entry(pointers, number + 1, FIRST_SUCCESSOR)):
            other = pointers.successor[2 * e]
            after = max(after, pointers.successor[2 * e + 1] + length_of(pointers, other) + pointers.tail[other])
        pointers.left[number] = after
        at = place[number] + 1
        if at < row[rank_of(pointers, number) + 1]:
            other = order[at]
            after = max(after, length_of(pointers, other) + pointers.tail[other])
        pointers.tail[number] = after
        if i < first:
            makespan = max(makespan, pointers.start[number] + length_of(pointers, number) + after)
    return makespan


@callee
def forwards(pointers: BlockPointers, first: int) -> int:
    """Compute starts of the window's tasks from ``first`` on; return the longest path through them."""
    order, row, place, start = pointers.order, pointers.row, pointers.place, pointers.start
    makespan = 0
    for i in range(first, pointers.window[1]):
        number = pointers.sorted[i]
        ready = 0
        for e in range(pointers.before_start[number], pointers.before_start[number + 1]):
            other = pointers.before[e]
            ready = max(ready, start[other] + length_of(pointers, other) + pointers.before_delay[e])
        pointers.released[number] = ready
        at = place[number]
        if at > row[rank_of(pointers, number)]:
            other = order[at - 1]
            ready = max(ready, start[other] + length_of(pointers, other))
        start[number] = ready
        makespan = max(makespan, ready + length_of(pointers, number) + pointers.tail[number])
    return makespan


@callee
def remeasure(pointers: BlockPointers, source: int, goal: int) -> int:
    """Return the longest path through the window after a task has moved, if the move creates no cycle.

    If all tasks are in the window, the result is the same as that of `measure`. In the topological order, only tasks
    between the moved task and the last task that it passed change places. The moved task and its successors among them
    go behind the others; if it moved ahead, the moved task and its predecessors go before the others.
    """
    order, row, place = pointers.order, pointers.row, pointers.place
    moved, marked, count = order[goal], pointers.waiting, 0
    marked[moved] = 1
    if source < goal:
        first = pointers.turn[moved]
        last = pointers.turn[order[goal - 1]]
        free = first
        for i in range(first, last + 1):
            number = pointers.sorted[i]
            at = place[number]
            if at > row[rank_of(pointers, number)] and marked[order[at - 1]] > 0:
                marked[number] = 1
            for e in range(pointers.before_start[number], pointers.before_start[number + 1]):
                if marked[pointers.before[e]] > 0:
                    marked[number] = 1
            if marked[number] > 0:
                pointers.path[count] = number
                count += 1
            else:
                pointers.sorted[free] = number
                free += 1
        for k in range(count):
            pointers.sorted[free + k] = pointers.path[k]
    else:
        first = pointers.turn[order[goal + 1]]
        last = pointers.turn[moved]
        free = last
        for i in range(last, first - 1, -1):
            number = pointers.sorted[i]
            at = place[number] + 1
            if at < row[rank_of(pointers, number) + 1] and marked[order[at]] > 0:
                marked[number] = 1
            for e in range(entry(pointers, number, FIRST_SUCCESSOR), entry(pointers, number + 1, FIRST_SUCCESSOR)):
                if marked[pointers.successor[2 * e]] > 0:
                    marked[number] = 1
            if marked[number] > 0:
                pointers.path[count] = number
                count += 1
            else:
                pointers.sorted[free] = number
                free -= 1
        for k in range(count):
            pointers.sorted[free - k] = pointers.path[k]
    for k in range(count):
        marked[pointers.path[k]] = -1
    for i in range(first, last + 1):
        pointers.turn[pointers.sorted[i]] = i
    held = pointers.level[min(source, goal)]
    for i in range(min(source, goal), max(source, goal) + 1):
        pointers.level[i] = held
        held += entry(pointers, order[i], NET)
    before = backwards(pointers, first, last)
    return int(max(before, forwards(pointers, first)))


@callee
def longest_path(pointers: BlockPointers, makespan: int, random: Array) -> int:
    """Write a longest path in the window into ``pointers.path`` and return its length. Ties are broken at random."""
    start, tail, ordered = pointers.start, pointers.tail, pointers.sorted
    low, at = pointers.window[0], pointers.window[1] - 1
    while at >= low and start[ordered[at]] + length_of(pointers, ordered[at]) + tail[ordered[at]] < makespan:
        at -= 1
    number = ordered[at] if at >= low else -1
    length = 0
    while number >= 0 and pointers.turn[number] >= low:
        at = pointers.place[number]
        pointers.path[length] = at
        length += 1
        begin = start[number]
        after = -1
        seen = 0
        if at > pointers.row[rank_of(pointers, number)]:
            neighbor = pointers.order[at - 1]
            if start[neighbor] + length_of(pointers, neighbor) == begin:
                after = neighbor
                seen = 1
        if pointers.released[number] == begin:
            for e in range(pointers.before_start[number], pointers.before_start[number + 1]):
                other = pointers.before[e]
                if start[other] + length_of(pointers, other) + pointers.before_delay[e] == begin:
                    seen += 1
                    if draw(random) % seen == 0:
                        after = other
        number = after
    return length
