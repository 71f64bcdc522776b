"""Measurements of an order of tasks for every rank: starts, tails, held bytes, and a longest path."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from pipeloom.compiled import Array, callee, inlined, kernel, pointers
from pipeloom.compiled.random import draw
from pipeloom.search.kernels.codes import DEADLOCK
from pipeloom.search.packed import COLUMNS, DURATION, FIRST_SUCCESSOR, NET, PLACE, PackedGraph
from pipeloom.taskgraph.rows import row_start


class Blocks(NamedTuple):
    """An order of tasks for every rank and its measurements, int64; see `make_blocks`.

    Most kernels read `pointers` to these arrays. A function with array arguments counts references to each array, which
    took two thirds of the time of tabu search.

    Attributes
    ----------
    task, successor, capacity : array
        As in `PackedGraph`. In pointers, rows of ``task`` have `COLUMNS` entries, and rows of ``successor`` have two.
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

    num_tasks: int
    num_ranks: int
    task: Array
    successor: Array
    capacity: Array
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


@inlined
def entry(blocks: Blocks, number: int, column: int) -> Any:
    """Return a property of a task."""
    return blocks.task[number * COLUMNS + column]


@inlined
def length_of(blocks: Blocks, number: int) -> Any:
    """Return the duration of a task, in ns."""
    return blocks.task[number * COLUMNS + DURATION]


@inlined
def rank_of(blocks: Blocks, number: int) -> Any:
    """Return the rank of a task."""
    return blocks.task[number * COLUMNS + PLACE] >> 2


def make_blocks(packed: PackedGraph, sequence: Array) -> Blocks:
    """Return arrays with the order of a sequence of all tasks, without measurements."""
    num_tasks, num_ranks = len(packed.waiting), len(packed.capacity)
    rank = packed.task[sequence, PLACE] >> 2
    order = sequence[np.argsort(rank, kind="stable")]
    row = row_start(rank, num_ranks)
    place = np.empty(num_tasks, np.int64)
    place[order] = np.arange(num_tasks)
    source = np.repeat(np.arange(num_tasks), np.diff(packed.task[:, FIRST_SUCCESSOR]))
    by_target = np.argsort(packed.successor[:, 0], kind="stable")
    before_start = np.zeros(num_tasks + 1, np.int64)
    np.cumsum(packed.waiting, out=before_start[1:])
    graph = packed.task, packed.successor, packed.capacity
    scratch = [np.zeros(num_tasks, np.int64) for _ in range(10)]
    before = source[by_target], packed.successor[by_target, 1].copy()
    window, begin = np.array([0, num_tasks], np.int64), row[:-1].copy()
    orders = order, place, row, *scratch
    return Blocks._make((num_tasks, num_ranks, *graph, *orders, window, begin, before_start, *before))


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
    backwards(pointers(blocks), done, done - 1)
    return makespan


@callee
def open_window(blocks: Blocks, low: int, high: int) -> int:
    """Restrict moves to a range of turns; return the longest path through its tasks.

    A start depends only on earlier tasks and a tail only on later tasks. While the window is open, starts before it and
    tails after it therefore remain valid. This function updates the others as far as the window needs them.
    """
    old_low, old_high = blocks.window[0], blocks.window[1]
    blocks.window[0] = low
    blocks.window[1] = high
    forwards(blocks, old_high)
    backwards(blocks, 0, old_low - 1)
    # The window should be an interval of time. A stable sort by starts is still a topological order.
    for i in range(low + 1, high):
        number = blocks.sorted[i]
        at = i
        while at > low and blocks.start[blocks.sorted[at - 1]] > blocks.start[number]:
            blocks.sorted[at] = blocks.sorted[at - 1]
            at -= 1
        blocks.sorted[at] = number
    for r in range(blocks.num_ranks):
        blocks.begin[r] = -1
    longest = 0
    for i in range(low, high):
        number = blocks.sorted[i]
        blocks.turn[number] = i
        rank = rank_of(blocks, number)
        if blocks.begin[rank] < 0:
            blocks.begin[rank] = blocks.place[number]
        longest = max(longest, blocks.start[number] + length_of(blocks, number) + blocks.tail[number])
    return int(longest)


@callee
def replace_window(blocks: Blocks, sequence: Array) -> int:
    """Reorder the window by the turns of a sequence; return the longest path through it."""
    low, high = blocks.window[0], blocks.window[1]
    for i in range(low, high):
        number = sequence[i]
        rank = rank_of(blocks, number)
        at = blocks.begin[rank]
        blocks.begin[rank] += 1
        blocks.sorted[i] = number
        blocks.turn[number] = i
        blocks.order[at] = number
        blocks.place[number] = at
        if at + 1 < blocks.row[rank + 1]:
            blocks.level[at + 1] = blocks.level[at] + entry(blocks, number, NET)
    for i in range(low, high):
        blocks.begin[rank_of(blocks, sequence[i])] -= 1
    backwards(blocks, low, high - 1)
    return int(forwards(blocks, low))


@callee
def backwards(blocks: Blocks, first: int, last: int) -> int:
    """Compute tails of the window's tasks up to ``last``; return the longest path through those before ``first``."""
    order, row, place = blocks.order, blocks.row, blocks.place
    makespan = 0
    for i in range(last, blocks.window[0] - 1, -1):
        number = blocks.sorted[i]
        after = 0
        for e in range(entry(blocks, number, FIRST_SUCCESSOR), entry(blocks, number + 1, FIRST_SUCCESSOR)):
            other = blocks.successor[2 * e]
            after = max(after, blocks.successor[2 * e + 1] + length_of(blocks, other) + blocks.tail[other])
        blocks.left[number] = after
        at = place[number] + 1
        if at < row[rank_of(blocks, number) + 1]:
            other = order[at]
            after = max(after, length_of(blocks, other) + blocks.tail[other])
        blocks.tail[number] = after
        if i < first:
            makespan = max(makespan, blocks.start[number] + length_of(blocks, number) + after)
    return makespan


@callee
def forwards(blocks: Blocks, first: int) -> int:
    """Compute starts of the window's tasks from ``first`` on; return the longest path through them."""
    order, row, place, start = blocks.order, blocks.row, blocks.place, blocks.start
    makespan = 0
    for i in range(first, blocks.window[1]):
        number = blocks.sorted[i]
        ready = 0
        for e in range(blocks.before_start[number], blocks.before_start[number + 1]):
            other = blocks.before[e]
            ready = max(ready, start[other] + length_of(blocks, other) + blocks.before_delay[e])
        blocks.released[number] = ready
        at = place[number]
        if at > row[rank_of(blocks, number)]:
            other = order[at - 1]
            ready = max(ready, start[other] + length_of(blocks, other))
        start[number] = ready
        makespan = max(makespan, ready + length_of(blocks, number) + blocks.tail[number])
    return makespan


@callee
def remeasure(blocks: Blocks, source: int, goal: int) -> int:
    """Return the longest path through the window after a task has moved, if the move creates no cycle.

    If all tasks are in the window, the result is the same as that of `measure`. In the topological order, only tasks
    between the moved task and the last task that it passed change places. The moved task and its successors among them
    go behind the others; if it moved ahead, the moved task and its predecessors go before the others.
    """
    order, row, place = blocks.order, blocks.row, blocks.place
    moved, marked, count = order[goal], blocks.waiting, 0
    marked[moved] = 1
    if source < goal:
        first = blocks.turn[moved]
        last = blocks.turn[order[goal - 1]]
        free = first
        for i in range(first, last + 1):
            number = blocks.sorted[i]
            at = place[number]
            if at > row[rank_of(blocks, number)] and marked[order[at - 1]] > 0:
                marked[number] = 1
            for e in range(blocks.before_start[number], blocks.before_start[number + 1]):
                if marked[blocks.before[e]] > 0:
                    marked[number] = 1
            if marked[number] > 0:
                blocks.path[count] = number
                count += 1
            else:
                blocks.sorted[free] = number
                free += 1
        for k in range(count):
            blocks.sorted[free + k] = blocks.path[k]
    else:
        first = blocks.turn[order[goal + 1]]
        last = blocks.turn[moved]
        free = last
        for i in range(last, first - 1, -1):
            number = blocks.sorted[i]
            at = place[number] + 1
            if at < row[rank_of(blocks, number) + 1] and marked[order[at]] > 0:
                marked[number] = 1
            for e in range(entry(blocks, number, FIRST_SUCCESSOR), entry(blocks, number + 1, FIRST_SUCCESSOR)):
                if marked[blocks.successor[2 * e]] > 0:
                    marked[number] = 1
            if marked[number] > 0:
                blocks.path[count] = number
                count += 1
            else:
                blocks.sorted[free] = number
                free -= 1
        for k in range(count):
            blocks.sorted[free - k] = blocks.path[k]
    for k in range(count):
        marked[blocks.path[k]] = -1
    for i in range(first, last + 1):
        blocks.turn[blocks.sorted[i]] = i
    held = blocks.level[min(source, goal)]
    for i in range(min(source, goal), max(source, goal) + 1):
        blocks.level[i] = held
        held += entry(blocks, order[i], NET)
    before = backwards(blocks, first, last)
    return int(max(before, forwards(blocks, first)))


@callee
def longest_path(blocks: Blocks, makespan: int, random: Array) -> int:
    """Write a longest path in the window into ``blocks.path`` and return its length. Ties are broken at random."""
    start, tail, ordered = blocks.start, blocks.tail, blocks.sorted
    low, at = blocks.window[0], blocks.window[1] - 1
    while at >= low and start[ordered[at]] + length_of(blocks, ordered[at]) + tail[ordered[at]] < makespan:
        at -= 1
    number = ordered[at] if at >= low else -1
    length = 0
    while number >= 0 and blocks.turn[number] >= low:
        at = blocks.place[number]
        blocks.path[length] = at
        length += 1
        begin = start[number]
        after = -1
        seen = 0
        if at > blocks.row[rank_of(blocks, number)]:
            neighbor = blocks.order[at - 1]
            if start[neighbor] + length_of(blocks, neighbor) == begin:
                after = neighbor
                seen = 1
        if blocks.released[number] == begin:
            for e in range(blocks.before_start[number], blocks.before_start[number + 1]):
                other = blocks.before[e]
                if start[other] + length_of(blocks, other) + blocks.before_delay[e] == begin:
                    seen += 1
                    if draw(random) % seen == 0:
                        after = other
        number = after
    return length
