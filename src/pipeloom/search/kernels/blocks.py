"""An order of tasks for every rank, measured: starts, tails, bytes held, and a longest path through it."""

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


class BlockPointers(NamedTuple):
    """Pointers to the arrays of `Blocks` and of its graph; see `block_pointers`.

    A function that gets arrays counts references to each of them, which took two thirds of the tabu search's time.
    ``task`` has rows of `COLUMNS` entries, ``successor`` of two.
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
def block_pointers(p: PackedGraph, b: Blocks) -> Any:
    """Collect the `BlockPointers` of an order; the arrays must outlive it."""
    return BlockPointers(
        pointer(p.task),
        pointer(p.successor),
        pointer(p.capacity),
        pointer(b.order),
        pointer(b.place),
        pointer(b.row),
        pointer(b.start),
        pointer(b.tail),
        pointer(b.released),
        pointer(b.left),
        pointer(b.level),
        pointer(b.trial),
        pointer(b.sorted),
        pointer(b.turn),
        pointer(b.waiting),
        pointer(b.path),
        pointer(b.window),
        pointer(b.begin),
        pointer(b.before_start),
        pointer(b.before),
        pointer(b.before_delay),
        len(b.order),
        len(b.begin),
    )


@inlined
def entry(s: BlockPointers, number: int, column: int) -> Any:
    """Return a property of a task."""
    return s.task[number * COLUMNS + column]


@inlined
def length_of(s: BlockPointers, number: int) -> Any:
    """Return the duration of a task, in ns."""
    return s.task[number * COLUMNS + DURATION]


@inlined
def rank_of(s: BlockPointers, number: int) -> Any:
    """Return the rank of a task."""
    return s.task[number * COLUMNS + PLACE] >> 2


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
def measure(p: PackedGraph, b: Blocks) -> int:
    """Measure the order: return its makespan and write starts, tails and levels, or return `DEADLOCK`."""
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
    backwards(block_pointers(p, b), done, done - 1)
    return makespan


@callee
def open_window(s: BlockPointers, low: int, high: int) -> int:
    """Restrict moves to the tasks of some turns; return the longest path through them.

    A start depends only on what comes before, and a tail only on what comes after: while the window is open, starts
    before it and tails behind it stay right. The others are made right here, as far as this window needs them.
    """
    old_low, old_high = s.window[0], s.window[1]
    s.window[0] = low
    s.window[1] = high
    forwards(s, old_high)
    backwards(s, 0, old_low - 1)
    # The window shall be a stretch of time. Any order by starts that keeps ties can be followed.
    for i in range(low + 1, high):
        number = s.sorted[i]
        at = i
        while at > low and s.start[s.sorted[at - 1]] > s.start[number]:
            s.sorted[at] = s.sorted[at - 1]
            at -= 1
        s.sorted[at] = number
    for r in range(s.num_ranks):
        s.begin[r] = -1
    longest = 0
    for i in range(low, high):
        number = s.sorted[i]
        s.turn[number] = i
        rank = rank_of(s, number)
        if s.begin[rank] < 0:
            s.begin[rank] = s.place[number]
        longest = max(longest, s.start[number] + length_of(s, number) + s.tail[number])
    return int(longest)


@callee
def replace_window(s: BlockPointers, sequence: Array) -> int:
    """Reorder the window by the turns of a sequence; return the longest path through it."""
    low, high = s.window[0], s.window[1]
    for i in range(low, high):
        number = sequence[i]
        rank = rank_of(s, number)
        at = s.begin[rank]
        s.begin[rank] += 1
        s.sorted[i] = number
        s.turn[number] = i
        s.order[at] = number
        s.place[number] = at
        if at + 1 < s.row[rank + 1]:
            s.level[at + 1] = s.level[at] + entry(s, number, NET)
    for i in range(low, high):
        s.begin[rank_of(s, sequence[i])] -= 1
    backwards(s, low, high - 1)
    return int(forwards(s, low))


@callee
def backwards(s: BlockPointers, first: int, last: int) -> int:
    """Compute tails of the window's tasks up to ``last``; return the longest path through those before ``first``."""
    order, row, place = s.order, s.row, s.place
    makespan = 0
    for i in range(last, s.window[0] - 1, -1):
        number = s.sorted[i]
        after = 0
        for e in range(entry(s, number, FIRST_SUCCESSOR), entry(s, number + 1, FIRST_SUCCESSOR)):
            other = s.successor[2 * e]
            after = max(after, s.successor[2 * e + 1] + length_of(s, other) + s.tail[other])
        s.left[number] = after
        at = place[number] + 1
        if at < row[rank_of(s, number) + 1]:
            other = order[at]
            after = max(after, length_of(s, other) + s.tail[other])
        s.tail[number] = after
        if i < first:
            makespan = max(makespan, s.start[number] + length_of(s, number) + after)
    return makespan


@callee
def forwards(s: BlockPointers, first: int) -> int:
    """Compute starts of the window's tasks from ``first`` on; return the longest path through them."""
    order, row, place, start = s.order, s.row, s.place, s.start
    makespan = 0
    for i in range(first, s.window[1]):
        number = s.sorted[i]
        ready = 0
        for e in range(s.before_start[number], s.before_start[number + 1]):
            other = s.before[e]
            ready = max(ready, start[other] + length_of(s, other) + s.before_delay[e])
        s.released[number] = ready
        at = place[number]
        if at > row[rank_of(s, number)]:
            other = order[at - 1]
            ready = max(ready, start[other] + length_of(s, other))
        start[number] = ready
        makespan = max(makespan, ready + length_of(s, number) + s.tail[number])
    return makespan


@callee
def remeasure(s: BlockPointers, source: int, goal: int) -> int:
    """Return the longest path through the window after a task has moved, if the move creates no cycle.

    If all is in the window, that is the same as `measure`.
    In the order that all ranks can follow, only the task and what depends on it (or what it depends on, if it moved
    ahead) must change places with the others up to the one that it passed last.
    """
    order, row, place = s.order, s.row, s.place
    moved, marked, count = order[goal], s.waiting, 0
    marked[moved] = 1
    if source < goal:
        first = s.turn[moved]
        last = s.turn[order[goal - 1]]
        free = first
        for i in range(first, last + 1):
            number = s.sorted[i]
            at = place[number]
            if at > row[rank_of(s, number)] and marked[order[at - 1]] > 0:
                marked[number] = 1
            for e in range(s.before_start[number], s.before_start[number + 1]):
                if marked[s.before[e]] > 0:
                    marked[number] = 1
            if marked[number] > 0:
                s.path[count] = number
                count += 1
            else:
                s.sorted[free] = number
                free += 1
        for k in range(count):
            s.sorted[free + k] = s.path[k]
    else:
        first = s.turn[order[goal + 1]]
        last = s.turn[moved]
        free = last
        for i in range(last, first - 1, -1):
            number = s.sorted[i]
            at = place[number] + 1
            if at < row[rank_of(s, number) + 1] and marked[order[at]] > 0:
                marked[number] = 1
            for e in range(entry(s, number, FIRST_SUCCESSOR), entry(s, number + 1, FIRST_SUCCESSOR)):
                if marked[s.successor[2 * e]] > 0:
                    marked[number] = 1
            if marked[number] > 0:
                s.path[count] = number
                count += 1
            else:
                s.sorted[free] = number
                free -= 1
        for k in range(count):
            s.sorted[free - k] = s.path[k]
    for k in range(count):
        marked[s.path[k]] = -1
    for i in range(first, last + 1):
        s.turn[s.sorted[i]] = i
    held = s.level[min(source, goal)]
    for i in range(min(source, goal), max(source, goal) + 1):
        s.level[i] = held
        held += entry(s, order[i], NET)
    before = backwards(s, first, last)
    return int(max(before, forwards(s, first)))


@callee
def longest_path(s: BlockPointers, makespan: int, random: Array) -> int:
    """Write a longest path within the window into ``s.path`` and return its length. Ties are broken at random."""
    low, at = s.window[0], s.window[1] - 1
    while at >= low and s.start[s.sorted[at]] + length_of(s, s.sorted[at]) + s.tail[s.sorted[at]] < makespan:
        at -= 1
    number = s.sorted[at] if at >= low else -1
    length = 0
    while number >= 0 and s.turn[number] >= low:
        at = s.place[number]
        s.path[length] = at
        length += 1
        begin = s.start[number]
        after = -1
        seen = 0
        if at > s.row[rank_of(s, number)]:
            neighbor = s.order[at - 1]
            if s.start[neighbor] + length_of(s, neighbor) == begin:
                after = neighbor
                seen = 1
        if s.released[number] == begin:
            for e in range(s.before_start[number], s.before_start[number + 1]):
                other = s.before[e]
                if s.start[other] + length_of(s, other) + s.before_delay[e] == begin:
                    seen += 1
                    if draw(random) % seen == 0:
                        after = other
        number = after
    return length
