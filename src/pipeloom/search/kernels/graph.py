"""Compiled loops over a task graph, for making a problem of it."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from pipeloom.compiled import kernel

Array = npt.NDArray[Any]


@kernel
def sort_topologically(start: Array, successor: Array, waiting: Array, stack: Array, order: Array) -> None:
    """Write the tasks depth first into ``order``; ``waiting``, numbers of predecessors, is used up."""
    top = 0
    for task in range(len(waiting)):
        if waiting[task] == 0:
            stack[top] = task
            top += 1
    done = 0
    while top > 0:
        top -= 1
        task = stack[top]
        order[done] = task
        done += 1
        for e in range(start[task], start[task + 1]):
            other = successor[e]
            waiting[other] -= 1
            if waiting[other] == 0:
                stack[top] = other
                top += 1


@kernel
def depths(
    segment: Array,
    microbatch: Array,
    module: Array,
    segment_class: Array,
    topological: Array,
    start: Array,
    predecessor: Array,
    depth: Array,
) -> Array:
    """Longest chain of segments of the same microbatch, module and class before each segment."""
    for task in topological:
        here = segment[task]
        for e in range(start[task], start[task + 1]):
            other = segment[predecessor[e]]
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
    """Mark those of the ``edges`` whose ends another path joins, too; stop after ``limit`` steps."""
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
                    # Doubled edges between the two do not imply each other.
                    if position[other] <= last and not (task == source[edge] and other == successor[edge]):
                        reached[other] = True
        implied[edge] = reached[successor[edge]]
        for i in range(first, last + 1):
            reached[topological[i]] = False
