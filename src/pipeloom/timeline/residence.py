"""How long a pair's activations stay at least: the longest path between its two tasks."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from pipeloom.taskgraph import NO_TASK, IntArray, TaskGraph

Array = npt.NDArray[Any]
STEP_LIMIT = 200_000_000
"""Steps after which the remaining pairs get zero: a weaker bound, but never a wrong one."""


def middles(graph: TaskGraph, duration: IntArray, topological: IntArray) -> IntArray:
    """Least time from the end of a pair's F to the start of its B or I, shape (num_pairs,); frozen: 0.

    The work grows with the distance of the two in ``topological``, which is short when that order finishes
    one microbatch before the next.
    """
    position = np.empty(graph.num_tasks, np.int64)
    position[topological] = np.arange(graph.num_tasks)
    middle = np.zeros(graph.num_pairs, np.int64)
    has = np.flatnonzero(graph.backward_of != NO_TASK)
    _middles(
        graph.forward_of[has], graph.backward_of[has], has, topological, position, duration, graph.successor_start,
        graph.successor, graph.successor_delay_ns, np.full(graph.num_tasks, -1, np.int64), middle, STEP_LIMIT,
    )  # fmt: skip
    return middle


@numba.njit(cache=True, nogil=True)
def _middles(
    forward: Array,
    backward: Array,
    pair: Array,
    topological: Array,
    position: Array,
    duration: Array,
    successor_start: Array,
    successor: Array,
    successor_delay: Array,
    reach: Array,
    middle: Array,
    limit: int,
) -> None:
    steps = 0
    for k in range(len(pair)):
        first = position[forward[k]]
        last = position[backward[k]]
        steps += last - first
        if steps > limit:
            return
        # reach: longest path from the end of F to a task's start; -1: not a descendant.
        reach[forward[k]] = -duration[forward[k]]
        for i in range(first, last):
            task = topological[i]
            if i > first and reach[task] < 0:
                continue
            end = reach[task] + duration[task]
            for e in range(successor_start[task], successor_start[task + 1]):
                other = successor[e]
                if position[other] <= last:
                    reach[other] = max(reach[other], end + successor_delay[e])
        middle[pair[k]] = reach[backward[k]]
        for i in range(first, last + 1):
            reach[topological[i]] = -1
