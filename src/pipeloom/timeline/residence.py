"""Least time that activations are held: between the tasks of a pair, and over all sub-microbatches of a module."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pipeloom.compiled import Array, inlined, kernel
from pipeloom.taskgraph import NO_TASK, IntArray, TaskGraph
from pipeloom.timeline.kernels import sort_topologically

STEP_LIMIT = 200_000_000
"""Limit of steps. The remaining pairs get zero, which is a weaker but valid bound."""


def quick_topological_order(graph: TaskGraph) -> IntArray:
    """Return a `topological_order` by a compiled loop, without a check for cycles."""
    order = np.empty(graph.num_tasks, np.int64)
    stack = np.empty(graph.num_tasks, np.int64)
    sort_topologically(graph.successor_start, graph.successor, np.diff(graph.predecessor_start), stack, order)
    return order


def middles(graph: TaskGraph, duration: IntArray, topological: IntArray) -> IntArray:
    """Return the least time from the end of a pair's F to the start of its B or I, shape (num_pairs,); else 0.

    It is the longest path between both tasks or, if larger, the work between them on their own rank, plus the least
    path before its first and after its last task.

    The running time grows with the distance of both tasks in ``topological``. It is short if that order finishes one
    microbatch before the next.
    """
    middle = np.zeros(graph.num_pairs, np.int64)
    has = np.flatnonzero(graph.backward_of != NO_TASK)
    paths = _paths(graph, duration, topological)
    _middles(paths, graph.forward_of[has], graph.backward_of[has], has, graph.rank, middle, STEP_LIMIT)
    return middle


def meetings(graph: TaskGraph, duration: IntArray, topological: IntArray, groups: list[IntArray]) -> IntArray:
    """Return the tasks that all pairs of a group have in between, as times of shape (num_groups, 3); -1 without any.

    Let J be the first and K the last task in ``topological`` that lie between both tasks of every pair of the group.
    The columns are the least path from the end of an F to J, the time from the start of J to the end of K, and the
    least path from the end of K to a B or I.
    """
    start = np.zeros(len(groups) + 1, np.int64)
    np.cumsum([len(group) for group in groups], out=start[1:])
    pairs = np.concatenate([np.zeros(0, np.int64), *groups])
    found = np.full((len(groups), 3), -1, np.int64)
    paths, count = _paths(graph, duration, topological), np.zeros(graph.num_tasks, np.int64)
    _meetings(paths, graph.forward_of[pairs], graph.backward_of[pairs], start, count, found, STEP_LIMIT)
    return found


class _Paths(NamedTuple):
    """A graph in topological order, and scratch arrays for path lengths."""

    topological: Array
    position: Array
    duration: Array
    successor_start: Array
    successor: Array
    delay: Array
    reach: Array
    left: Array


def _paths(graph: TaskGraph, duration: IntArray, topological: IntArray) -> _Paths:
    position = np.empty_like(topological)
    position[topological] = np.arange(len(topological))
    return _Paths(
        topological,
        position,
        duration,
        graph.successor_start,
        graph.successor,
        graph.successor_delay_ns,
        np.full(graph.num_tasks, -1, np.int64),
        np.full(graph.num_tasks, -1, np.int64),
    )


@inlined
def _reach(paths: _Paths, source: int, last: int) -> None:
    """Write longest paths from the end of ``source`` to the start of its descendants up to ``last``; else -1."""
    position, reach = paths.position, paths.reach
    first = position[source]
    reach[source] = -paths.duration[source]
    for i in range(first, last):
        task = paths.topological[i]
        if i > first and reach[task] < 0:
            continue
        end = reach[task] + paths.duration[task]
        for e in range(paths.successor_start[task], paths.successor_start[task + 1]):
            other = paths.successor[e]
            if position[other] <= last:
                reach[other] = max(reach[other], end + paths.delay[e])


@inlined
def _reach_back(paths: _Paths, target: int, first: int) -> None:
    """Write longest paths from the ends of tasks from ``first`` on to the start of ``target``; else -1."""
    position, left = paths.position, paths.left
    last = position[target]
    left[target] = -paths.duration[target]
    for i in range(last - 1, first - 1, -1):
        task = paths.topological[i]
        for e in range(paths.successor_start[task], paths.successor_start[task + 1]):
            other = paths.successor[e]
            if position[other] <= last and (other == target or left[other] >= 0):
                left[task] = max(left[task], paths.delay[e] + paths.duration[other] + left[other])


@inlined
def _reset(paths: _Paths, first: int, last: int) -> None:
    """Reset path lengths of the tasks from place ``first`` to ``last``."""
    for i in range(first, last + 1):
        paths.reach[paths.topological[i]] = -1
        paths.left[paths.topological[i]] = -1


@kernel
def _middles(
    paths: _Paths, forward: Array, backward: Array, pair: Array, rank: Array, middle: Array, limit: int
) -> None:
    topological, position, duration = paths.topological, paths.position, paths.duration
    reach, left = paths.reach, paths.left
    steps = 0
    for k in range(len(pair)):
        first, last = position[forward[k]], position[backward[k]]
        steps += 2 * (last - first)
        if steps > limit:
            return
        _reach(paths, forward[k], last)
        _reach_back(paths, backward[k], first)
        work = 0
        before = reach[backward[k]]
        after = before
        for i in range(first + 1, last):
            task = topological[i]
            if rank[task] == rank[forward[k]] and reach[task] >= 0 and left[task] >= 0:
                work += duration[task]
                before = min(before, reach[task])
                after = min(after, left[task])
        middle[pair[k]] = reach[backward[k]]
        if work > 0:
            middle[pair[k]] = max(middle[pair[k]], before + work + after)
        _reset(paths, first, last)


@kernel
def _meetings(
    paths: _Paths, forward: Array, backward: Array, start: Array, count: Array, found: Array, limit: int
) -> None:
    topological, position, duration = paths.topological, paths.position, paths.duration
    reach, left = paths.reach, paths.left
    steps = 0
    for g in range(len(start) - 1):
        lowest = len(topological)
        highest = 0
        meet = -1
        part = -1
        # Turn 0 finds the tasks between those of all pairs, turn 1 the paths to them.
        for turn in range(2):
            before = 1 << 62
            after = 1 << 62
            for k in range(start[g], start[g + 1]):
                first, last = position[forward[k]], position[backward[k]]
                lowest = min(lowest, first)
                highest = max(highest, last)
                steps += 2 * (last - first)
                if steps > limit:
                    return
                # In turn 1, no path to the common tasks goes beyond them.
                _reach(paths, forward[k], last if turn == 0 else position[meet])
                _reach_back(paths, backward[k], first if turn == 0 else position[part])
                if turn == 0:
                    for i in range(first + 1, last):
                        task = topological[i]
                        count[task] += reach[task] >= 0 and left[task] >= 0
                else:
                    before = min(before, reach[meet])
                    after = min(after, left[part])
                _reset(paths, first, last)
            if turn == 0:
                for i in range(lowest, highest + 1):
                    task = topological[i]
                    if count[task] == start[g + 1] - start[g]:
                        meet = task if meet < 0 else meet
                        part = task
                    count[task] = 0
                if meet < 0:
                    break
        if meet < 0:
            continue
        found[g, 0] = before
        found[g, 2] = after
        found[g, 1] = duration[meet]
        if part != meet:
            last = position[part]
            _reach(paths, meet, last)
            if reach[part] >= 0:
                found[g, 1] = duration[meet] + reach[part] + duration[part]
            else:
                # Without a path between them, both may run at once, in any order.
                found[g, 1] = -1
            _reset(paths, position[meet], last)
