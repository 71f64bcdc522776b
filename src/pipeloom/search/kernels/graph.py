"""Compiled loops over a task graph that prepare a search."""

from __future__ import annotations

import numpy as np

from pipeloom.compiled import Array, allocating, kernel
from pipeloom.taskgraph import FORWARD, WEIGHT_GRADIENT


@kernel
def join(start: Array, successor: Array, parent: Array) -> None:
    """Write the smallest task of its connected component for every task; ``parent`` is the identity on entry."""
    for task in range(len(parent)):
        for e in range(start[task], start[task + 1]):
            one, other = task, successor[e]
            while parent[one] != one:
                parent[one] = parent[parent[one]]
                one = parent[one]
            while parent[other] != other:
                parent[other] = parent[parent[other]]
                other = parent[other]
            parent[max(one, other)] = min(one, other)
    # A parent is smaller than its children, so by now it has its own root.
    for task in range(len(parent)):
        parent[task] = parent[parent[task]]


@allocating
def walk(
    start: Array,
    successor: Array,
    kind: Array,
    waiting: Array,
    members: Array,
    member_start: Array,
    stacks: Array,
    order: Array,
) -> None:
    """Write the tasks into ``order``, part after part, depth first and with backwards as early as possible.

    ``members[member_start[j]:member_start[j + 1]]`` are the tasks of part j in ascending order. ``waiting`` holds the
    numbers of predecessors and is overwritten. ``stacks`` is scratch of shape (2, num_tasks), for forwards and for
    other tasks. Among tasks that become ready at once, weight gradients come first, then lower numbers.
    """
    done = 0
    opened, top = np.empty(stacks.shape[1], np.int64), np.zeros(2, np.int64)
    for part in range(len(member_start) - 1):
        top[0] = top[1] = 0
        for i in range(member_start[part + 1] - 1, member_start[part] - 1, -1):
            task = members[i]
            if waiting[task] == 0:
                which = int(kind[task] != FORWARD)
                stacks[which, top[which]] = task
                top[which] += 1
        while top[0] + top[1] > 0:
            which = int(top[1] > 0)
            top[which] -= 1
            task = stacks[which, top[which]]
            order[done] = task
            done += 1
            count = 0
            for e in range(start[task], start[task + 1]):
                other = successor[e]
                waiting[other] -= 1
                if waiting[other] == 0:
                    opened[count] = other if kind[other] != WEIGHT_GRADIENT else other - len(kind)
                    count += 1
            if count > 1:
                opened[:count].sort()
            for i in range(count - 1, -1, -1):
                other = opened[i] if opened[i] >= 0 else opened[i] + len(kind)
                which = int(kind[other] != FORWARD)
                stacks[which, top[which]] = other
                top[which] += 1


@kernel
def depths(
    pass_id: Array,
    microbatch: Array,
    module: Array,
    segment_class: Array,
    topological: Array,
    start: Array,
    predecessor: Array,
    depth: Array,
) -> Array:
    """Compute the longest chain of segments of the same microbatch, module and class before each segment."""
    for task in topological:
        here = pass_id[task]
        for e in range(start[task], start[task + 1]):
            other = pass_id[predecessor[e]]
            if (
                other != here
                and microbatch[other] == microbatch[here]
                and module[other] == module[here]
                and segment_class[other] == segment_class[here]
            ):
                depth[here] = max(depth[here], depth[other] + 1)
    return depth


@kernel
def mark_implied(
    edges: Array,
    source: Array,
    successor: Array,
    successor_start: Array,
    topological: Array,
    position: Array,
    reached: Array,
    implied: Array,
    limit: int,
) -> None:
    """Mark the ``edges`` that another path implies; stop after ``limit`` steps."""
    steps = 0
    for edge in edges:
        first = position[source[edge]]
        last = position[successor[edge]]
        steps += last - first
        if steps > limit:
            return
        reached[source[edge]] = True
        for i in range(first, last):
            task = topological[i]
            if reached[task]:
                for e in range(successor_start[task], successor_start[task + 1]):
                    other = successor[e]
                    # Duplicate edges between the same two tasks do not imply each other.
                    if position[other] <= last and not (task == source[edge] and other == successor[edge]):
                        reached[other] = True
        implied[edge] = reached[successor[edge]]
        for i in range(first, last + 1):
            reached[topological[i]] = False
