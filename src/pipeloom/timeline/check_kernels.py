"""Compiled loop of `pipeloom.timeline.check`. It shares no code with the simulator.

It walks along the ranks, not along the edges. A rank runs until its next task waits for a task that has not run, which
then wakes it. Every task and edge is visited once or twice, for any number of ranks.
"""

from __future__ import annotations

import numpy as np

from pipeloom.compiled import Array, allocating


@allocating
def earliest(
    order: Array,
    rows: Array,
    before_start: Array,
    before: Array,
    delay: Array,
    duration: Array,
    start: Array,
    depth: Array,
) -> int:
    """Write the earliest start of every task, and the number of tasks on a path to it; return how many could run.

    ``order[rows[r]:rows[r + 1]]`` are the tasks of rank r, ``before`` with ``delay`` the predecessors by task.
    ``start`` is -1 on entry. Tasks that cannot run keep their ``start`` and ``depth``.
    """
    num_ranks = len(rows) - 1
    position = rows[:-1].copy()
    next_edge = np.full(num_ranks, -1)  # first edge of a rank's next task that may still block
    waiting = np.full(len(duration), -1)  # one rank that waits for a task,
    beside = np.full(num_ranks, -1)  # and the next rank that waits for the same task
    awake = np.arange(num_ranks)
    num_awake = num_ranks
    done = 0
    while num_awake > 0:
        num_awake -= 1
        rank = awake[num_awake]
        while position[rank] < rows[rank + 1]:
            task = order[position[rank]]
            edge = max(next_edge[rank], before_start[task])
            while edge < before_start[task + 1] and start[before[edge]] >= 0:
                edge += 1
            if edge < before_start[task + 1]:
                next_edge[rank] = edge
                beside[rank] = waiting[before[edge]]
                waiting[before[edge]] = rank
                break
            next_edge[rank] = -1
            at, deep = 0, 0
            if position[rank] > rows[rank]:
                previous = order[position[rank] - 1]
                at, deep = start[previous] + duration[previous], depth[previous]
            for e in range(before_start[task], before_start[task + 1]):
                at = max(at, start[before[e]] + duration[before[e]] + delay[e])
                deep = max(deep, depth[before[e]])
            start[task] = at
            depth[task] = deep + 1
            position[rank] += 1
            done += 1
            other = waiting[task]
            while other >= 0:
                awake[num_awake] = other
                num_awake += 1
                other = beside[other]
    return done
