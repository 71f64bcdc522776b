"""The compiled loop of `pipeloom.timeline.check`, which shares nothing with the simulator's.

It walks along the ranks, not along the edges: a rank goes on until its next task waits for one that has not run, and is
woken by that one. Every task and edge is looked at once or twice, however many ranks there are.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pipeloom.compiled import allocating

Array = npt.NDArray[Any]


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
    ``start`` is -1 on entry, and stays so where a task waits for itself; so does ``depth`` as it is.
    """
    num_ranks = len(rows) - 1
    position = rows[:-1].copy()
    looked_at = np.full(num_ranks, -1)  # edges to a rank's next task that it need not wait for
    waiting = np.full(len(duration), -1)  # a rank that waits for a task,
    beside = np.full(num_ranks, -1)  # and another one that waits for the same
    awake = np.arange(num_ranks)
    num_awake = num_ranks
    done = 0
    while num_awake > 0:
        num_awake -= 1
        rank = awake[num_awake]
        while position[rank] < rows[rank + 1]:
            task = order[position[rank]]
            edge = max(looked_at[rank], before_start[task])
            while edge < before_start[task + 1] and start[before[edge]] >= 0:
                edge += 1
            if edge < before_start[task + 1]:
                looked_at[rank] = edge
                beside[rank] = waiting[before[edge]]
                waiting[before[edge]] = rank
                break
            looked_at[rank] = -1
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
