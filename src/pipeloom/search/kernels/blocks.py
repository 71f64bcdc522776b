"""An order of tasks for every rank, measured: starts, tails, bytes held, and a longest path through it."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pipeloom.compiled import callee, kernel
from pipeloom.compiled.random import draw
from pipeloom.search.kernels.codes import DEADLOCK
from pipeloom.search.packed import DURATION, FIRST_SUCCESSOR, NET, PLACE, PackedGraph

Array = npt.NDArray[Any]


class Blocks(NamedTuple):
    """An order of tasks for every rank, and what is known of it, int64; see `make_blocks`.

    Attributes
    ----------
    order, place : array, shape (num_tasks,)
        Tasks rank after rank, and the inverse.
    row : array, shape (num_ranks + 1,)
        The order of rank r stands at ``row[r]`` to ``row[r + 1]``.
    start, tail : array, shape (num_tasks,)
        Longest path up to a task, and from its end to the end of all.
    released, left : array, shape (num_tasks,)
        The same without the task's neighbours on its rank.
    level : array, shape (num_tasks,)
        Bytes that the rank holds before what is at each place.
    trial : array, shape (num_tasks,)
        Scratch: starts under a move that is judged.
    sorted, turn : array, shape (num_tasks,)
        All tasks in an order that all ranks can follow, and the inverse.
    waiting : array, shape (num_tasks,)
        Scratch: predecessors left.
    path : array, shape (num_tasks,)
        Places along a longest path, from its end.
    window : array, shape (2,)
        Only tasks from the first of these turns to before the second move; see `open_window`.
    begin : array, shape (num_ranks,)
        Where in the order every rank's part of the window begins.
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


def make_blocks(packed: PackedGraph, sequence: Array) -> Blocks:
    """Arrays with the order that a sequence of all tasks gives, not yet measured."""
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
    """One sequence that all ranks can follow, of an order that is measured; ties keep every rank's order."""
    ends = blocks.start + packed.task[:-1, DURATION]
    sequence: Array = np.lexsort((blocks.place, ends, blocks.start))
    return sequence


@kernel
def measure(p: PackedGraph, b: Blocks) -> int:
    """Makespan of the order at hand, with its starts, tails and levels; `DEADLOCK` where ranks wait for each other."""
    task, successor, order, row, place = p.task, p.successor, b.order, b.row, b.place
    start, released, waiting = b.start, b.released, b.waiting
    top = 0
    for number in range(len(start)):
        waiting[number] = p.waiting[number]
        released[number] = 0
        start[number] = 0
    # Waiting counts one less than the predecessors left, once the task before on the rank is done.
    for r in range(len(row) - 1):
        level = 0
        for i in range(row[r], row[r + 1]):
            b.level[i] = level
            level += task[order[i], NET]
        if row[r] < row[r + 1]:
            first = order[row[r]]
            waiting[first] -= 1
            if waiting[first] < 0:
                b.sorted[top] = first
                top += 1
    done = 0
    makespan = 0
    while done < top:
        number = b.sorted[done]
        done += 1
        start[number] = max(start[number], released[number])
        end = start[number] + task[number, DURATION]
        makespan = max(makespan, end)
        for e in range(task[number, FIRST_SUCCESSOR], task[number + 1, FIRST_SUCCESSOR]):
            other = successor[e, 0]
            released[other] = max(released[other], end + successor[e, 1])
            waiting[other] -= 1
            if waiting[other] < 0:
                b.sorted[top] = other
                top += 1
        at = place[number] + 1
        if at < row[(task[number, PLACE] >> 2) + 1]:
            other = order[at]
            start[other] = end
            waiting[other] -= 1
            if waiting[other] < 0:
                b.sorted[top] = other
                top += 1
    if done < len(order):
        return DEADLOCK
    for i in range(done):
        b.turn[b.sorted[i]] = i
    b.window[0] = 0
    b.window[1] = done
    for r in range(len(row) - 1):
        b.begin[r] = row[r]
    backwards(p, b, done, done - 1)
    return makespan


@callee
def open_window(p: PackedGraph, b: Blocks, low: int, high: int) -> int:
    """Let only the tasks of some turns move from now on; return the longest path through these.

    A start depends only on what comes before, and a tail only on what comes after: while the window is open, starts
    before it and tails behind it stay right. The others are made right here, as far as this window needs them.
    """
    old_low, old_high = b.window[0], b.window[1]
    b.window[0] = low
    b.window[1] = high
    forwards(p, b, old_high)
    backwards(p, b, 0, old_low - 1)
    # The window shall be a stretch of time. Any order by starts that keeps ties can be followed.
    for i in range(low + 1, high):
        number = b.sorted[i]
        at = i
        while at > low and b.start[b.sorted[at - 1]] > b.start[number]:
            b.sorted[at] = b.sorted[at - 1]
            at -= 1
        b.sorted[at] = number
    for r in range(len(b.begin)):
        b.begin[r] = -1
    longest = 0
    for i in range(low, high):
        number = b.sorted[i]
        b.turn[number] = i
        rank = p.task[number, PLACE] >> 2
        if b.begin[rank] < 0:
            b.begin[rank] = b.place[number]
        longest = max(longest, b.start[number] + p.task[number, DURATION] + b.tail[number])
    return int(longest)


@callee
def replace_window(p: PackedGraph, b: Blocks, sequence: Array) -> int:
    """Give the window another order, that of its turns in a sequence; return the longest path through it."""
    low, high = b.window[0], b.window[1]
    for i in range(low, high):
        number = sequence[i]
        rank = p.task[number, PLACE] >> 2
        at = b.begin[rank]
        b.begin[rank] += 1
        b.sorted[i] = number
        b.turn[number] = i
        b.order[at] = number
        b.place[number] = at
        if at + 1 < b.row[rank + 1]:
            b.level[at + 1] = b.level[at] + p.task[number, NET]
    for i in range(low, high):
        b.begin[p.task[sequence[i], PLACE] >> 2] -= 1
    backwards(p, b, low, high - 1)
    return int(forwards(p, b, low))


@callee
def backwards(p: PackedGraph, b: Blocks, first: int, last: int) -> int:
    """Tails of the window's tasks up to ``last``; return the longest path through those before ``first``, if any."""
    task, successor, order, row, place = p.task, p.successor, b.order, b.row, b.place
    makespan = 0
    for i in range(last, b.window[0] - 1, -1):
        number = b.sorted[i]
        after = 0
        for e in range(task[number, FIRST_SUCCESSOR], task[number + 1, FIRST_SUCCESSOR]):
            other = successor[e, 0]
            after = max(after, successor[e, 1] + task[other, DURATION] + b.tail[other])
        b.left[number] = after
        at = place[number] + 1
        if at < row[(task[number, PLACE] >> 2) + 1]:
            other = order[at]
            after = max(after, task[other, DURATION] + b.tail[other])
        b.tail[number] = after
        if i < first:
            makespan = max(makespan, b.start[number] + task[number, DURATION] + after)
    return makespan


@callee
def forwards(p: PackedGraph, b: Blocks, first: int) -> int:
    """Starts of the window's tasks from ``first`` on; return the longest path through these."""
    task, order, row, place, start = p.task, b.order, b.row, b.place, b.start
    makespan = 0
    for i in range(first, b.window[1]):
        number = b.sorted[i]
        ready = 0
        for e in range(b.before_start[number], b.before_start[number + 1]):
            other = b.before[e]
            ready = max(ready, start[other] + task[other, DURATION] + b.before_delay[e])
        b.released[number] = ready
        at = place[number]
        if at > row[task[number, PLACE] >> 2]:
            other = order[at - 1]
            ready = max(ready, start[other] + task[other, DURATION])
        start[number] = ready
        makespan = max(makespan, ready + task[number, DURATION] + b.tail[number])
    return makespan


@callee
def remeasure(p: PackedGraph, b: Blocks, source: int, goal: int) -> int:
    """The longest path through the window after a task has moved from one place to another, which makes no circle.

    If all is in the window, that is the same as `measure`.
    In the order that all ranks can follow, only the task and what depends on it (or what it depends on, if it moved
    ahead) must change places with the others up to the one that it passed last.
    """
    task, order, row, place = p.task, b.order, b.row, b.place
    moved, marked, count = order[goal], b.waiting, 0
    marked[moved] = 1
    if source < goal:
        first = b.turn[moved]
        last = b.turn[order[goal - 1]]
        free = first
        for i in range(first, last + 1):
            number = b.sorted[i]
            at = place[number]
            if at > row[task[number, PLACE] >> 2] and marked[order[at - 1]] > 0:
                marked[number] = 1
            for e in range(b.before_start[number], b.before_start[number + 1]):
                if marked[b.before[e]] > 0:
                    marked[number] = 1
            if marked[number] > 0:
                b.path[count] = number
                count += 1
            else:
                b.sorted[free] = number
                free += 1
        for k in range(count):
            b.sorted[free + k] = b.path[k]
    else:
        first = b.turn[order[goal + 1]]
        last = b.turn[moved]
        free = last
        for i in range(last, first - 1, -1):
            number = b.sorted[i]
            at = place[number] + 1
            if at < row[(task[number, PLACE] >> 2) + 1] and marked[order[at]] > 0:
                marked[number] = 1
            for e in range(task[number, FIRST_SUCCESSOR], task[number + 1, FIRST_SUCCESSOR]):
                if marked[p.successor[e, 0]] > 0:
                    marked[number] = 1
            if marked[number] > 0:
                b.path[count] = number
                count += 1
            else:
                b.sorted[free] = number
                free -= 1
        for k in range(count):
            b.sorted[free - k] = b.path[k]
    for k in range(count):
        marked[b.path[k]] = -1
    for i in range(first, last + 1):
        b.turn[b.sorted[i]] = i
    held = b.level[min(source, goal)]
    for i in range(min(source, goal), max(source, goal) + 1):
        b.level[i] = held
        held += task[order[i], NET]
    before = backwards(p, b, first, last)
    return int(max(before, forwards(p, b, first)))


@callee
def longest_path(p: PackedGraph, b: Blocks, makespan: int, random: Array) -> int:
    """Write a longest path, within the window, into ``b.path``; return its length. Where several meet, one is drawn."""
    low, at = b.window[0], b.window[1] - 1
    while at >= low and b.start[b.sorted[at]] + p.task[b.sorted[at], DURATION] + b.tail[b.sorted[at]] < makespan:
        at -= 1
    number = b.sorted[at] if at >= low else -1
    length = 0
    while number >= 0 and b.turn[number] >= low:
        at = b.place[number]
        b.path[length] = at
        length += 1
        begin = b.start[number]
        after = -1
        seen = 0
        if at > b.row[p.task[number, PLACE] >> 2]:
            neighbour = b.order[at - 1]
            if b.start[neighbour] + p.task[neighbour, DURATION] == begin:
                after = neighbour
                seen = 1
        if b.released[number] == begin:
            for e in range(b.before_start[number], b.before_start[number + 1]):
                other = b.before[e]
                if b.start[other] + p.task[other, DURATION] + b.before_delay[e] == begin:
                    seen += 1
                    if draw(random) % seen == 0:
                        after = other
        number = after
    return length
