"""The least idle time of every rank before its first pass and after its last one, from passes over all ranks."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from pipeloom.taskgraph import FORWARD, INPUT_GRADIENT, NO_TASK, BoolArray, IntArray, TaskGraph
from pipeloom.taskgraph.rows import Links


def warm_up(graph: TaskGraph, least: IntArray, most: IntArray, first: Mapping[int, int]) -> Mapping[int, int]:
    """Return the least idle time of every rank before the first pass that ends on the last rank reaches it.

    ``first`` is the longest path to the first task of every rank that has tasks. The rank is idle until then.

    Of the forward passes that a backward waits for, let J be the one that starts first on the last rank. Until J
    starts there, no backward runs anywhere. Let A_r be the start of J on rank r and X_r the work done there before.
    Work done on rank r + 1 before A_{r+1} had been done on rank r by A_{r+1} less the least delay d, and is not J. So
    with equal durations X_{r+1} <= X_r + A_{r+1} - d - A_r - f(J, r), that is,
    idle_{r+1} >= idle_r + f(J, r) + d, even if passes overtake one another. Work on rank r + 1 that is longer than on
    rank r, or has no counterpart there, is subtracted. The chain may start from any lower bound of
    idle_r, such as ``first``, and rise to it at every rank.

    Every backward must descend from forwards on the last rank that are part of a pass over all ranks, in rank order.
    Otherwise the result is ``first``.
    """
    return _chain(graph, graph.kind == FORWARD, graph.predecessors, least, most, first)


def cool_down(graph: TaskGraph, least: IntArray, most: IntArray, last: Mapping[int, int]) -> Mapping[int, int]:
    """Mirror image of `warm_up` in time; ``last`` with split backwards, whose W may run in the cool-down.

    The two windows of a rank do not overlap. Every forward ends before the last backward pass begins on the last rank,
    so before it ends on this rank; and the first window ends at a forward's start.
    """
    if (graph.kind >= INPUT_GRADIENT).any():
        return last
    return _chain(graph, graph.kind != FORWARD, graph.successors, least, most, last)


def _chain(
    graph: TaskGraph, inside: BoolArray, links: Links, least: IntArray, most: IntArray, floor: Mapping[int, int]
) -> Mapping[int, int]:
    """Return the idle time by rank that passes of the ``inside`` tasks cause.

    ``links`` are predecessors (successors in reversed time). ``floor`` is a lower bound of the idle time of every rank
    with tasks, known from elsewhere.
    """
    turning = _turning(graph, inside, links)
    if not turning:
        return floor
    # slot[s, r]: the inside task of segment s on rank r.
    slot = np.full((graph.num_passes, graph.num_ranks), NO_TASK, np.int64)
    tasks = np.flatnonzero(inside)
    slot[graph.pass_id[tasks], graph.rank[tasks]] = tasks
    linked = _delays_along_segments(graph, tasks, links)
    passes = slot[graph.pass_id[np.array(turning)]]
    if (passes == NO_TASK).any() or (linked[passes[:, 1:]] < 0).any():
        return floor
    idle = np.full(len(passes), floor[0], np.int64)
    answer = {0: floor[0]}
    for rank in range(1, graph.num_ranks):
        here = tasks[graph.rank[tasks] == rank]
        has = linked[here] >= 0
        matched = here[has]
        before = slot[graph.pass_id[matched], rank - 1]
        excess = int(np.maximum(0, most[matched] - least[before]).sum() + most[here[~has]].sum())
        wire = int(linked[matched].min())
        idle = np.maximum(idle + least[passes[:, rank - 1]] + wire - excess, floor[rank])
        answer[rank] = int(idle.min())
    return answer


def _turning(graph: TaskGraph, inside: BoolArray, links: Links) -> list[int]:
    """Return inside tasks on the last rank such that every outside task descends from one of them; empty if none.

    Only outside tasks without an outside predecessor are checked: each needs such a task as direct predecessor.
    """
    target, neighbor = np.repeat(np.arange(graph.num_tasks), np.diff(links.start)), links.other
    outside_before = np.zeros(graph.num_tasks, bool)
    outside_before[target[~inside[neighbor]]] = True
    roots = set(np.flatnonzero(~inside & ~outside_before).tolist())
    crossing = ~inside[target] & inside[neighbor] & (graph.rank[neighbor] == graph.num_ranks - 1)
    found: dict[int, int] = {}
    for root, task in zip(target[crossing].tolist(), neighbor[crossing].tolist(), strict=True):
        # Prefer the root's own pair, which serves only this root, so that the set stays small.
        if root in roots and (root not in found or graph.pair[root] == graph.pair[task]):
            found[root] = task
    return sorted(set(found.values())) if roots and len(found) == len(roots) else []


def _delays_along_segments(graph: TaskGraph, tasks: IntArray, links: Links) -> IntArray:
    """Return each task's delay from its own segment's task on the previous rank; -1 without such an edge."""
    target, neighbor = np.repeat(np.arange(graph.num_tasks), np.diff(links.start)), links.other
    same = (graph.pass_id[target] == graph.pass_id[neighbor]) & (graph.rank[target] == graph.rank[neighbor] + 1)
    linked = np.full(graph.num_tasks, -1, np.int64)
    np.maximum.at(linked, target[same], links.delay[same])
    kept = np.full(graph.num_tasks, -1, np.int64)
    kept[tasks] = linked[tasks]
    return kept
