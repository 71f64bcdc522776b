"""Memory strategies for a fixed order: the fastest candidate of every pair that memory allows.

Memory in use depends on a rank's order alone, so each rank is a problem of its own (`dip.txt` §5.3): choose
one candidate per pair, with the least total time, such that nowhere along the rank's order more is held than
the rank has room for.
"""

from __future__ import annotations

import numpy as np

from pipeloom.search.plain import leanest
from pipeloom.taskgraph import NO_TASK, IntArray, TaskGraph
from pipeloom.timeline import Schedule
from pipeloom.timeline.bounds import Options, pair_options


def choose_strategies(graph: TaskGraph, schedule: Schedule) -> Schedule:
    """Start from the leanest candidates and take the upgrade that saves most time per byte, while any fits.

    The schedule's own candidates do not matter; its order must fit with the leanest ones.
    """
    assert graph.candidates is not None
    choice = np.array(leanest(graph), np.int64)
    options = pair_options(graph)
    for rank in range(graph.num_ranks):
        _upgrade_rank(graph, options, schedule.order[rank], rank, choice)
    return Schedule(schedule.order, choice, schedule.method)


def _upgrade_rank(graph: TaskGraph, options: Options, order: IntArray, rank: int, choice: IntArray) -> None:
    assert graph.candidates is not None
    place = np.full(graph.num_tasks, -1, np.int64)
    place[order] = np.arange(len(order))
    pairs = np.flatnonzero(graph.rank[graph.forward_of] == rank)
    total = options.forward_ns + options.backward_ns + options.weight_ns
    if graph.capacity_bytes is None:
        choice[pairs] = total[pairs].argmin(axis=1)
        return
    room = int(graph.capacity_bytes[rank] - graph.static_bytes[rank])
    first = place[graph.forward_of]
    last = np.where(graph.backward_of == NO_TASK, first, place[graph.backward_of])
    weight = np.where(graph.weight_of == NO_TASK, last, place[graph.weight_of])
    level = np.zeros(len(order), np.int64)
    mine = np.flatnonzero((graph.rank[graph.edge_source] == rank) & (graph.edge_bytes > 0))
    for edge in mine.tolist():
        level[place[graph.edge_source[edge]] + 1 : place[graph.edge_target[edge]] + 1] += graph.edge_bytes[
            edge
        ]
    for pair in pairs.tolist():
        level[first[pair] : last[pair] + 1] += options.activation_bytes[pair, choice[pair]]
        level[last[pair] + 1 : weight[pair] + 1] += options.weight_gradient_bytes[pair, choice[pair]]
    waiting = set(pairs.tolist())
    offers = []
    for pair in pairs.tolist():
        now = choice[pair]
        for j in range(len(graph.candidates[pair])):
            saved = int(total[pair, now] - total[pair, j])
            if saved > 0:
                more = max(1, int(options.activation_bytes[pair, j] - options.activation_bytes[pair, now]))
                offers.append((saved / more / max(1, last[pair] - first[pair]), pair, j))
    # Dense offers first; a pair may be upgraded again by a later, larger offer.
    for _, pair, j in sorted(offers, reverse=True):
        now = int(choice[pair])
        if pair not in waiting or total[pair, j] >= total[pair, now]:
            continue
        held = slice(int(first[pair]), int(last[pair]) + 1)
        after = slice(int(last[pair]) + 1, int(weight[pair]) + 1)
        more = int(options.activation_bytes[pair, j] - options.activation_bytes[pair, now])
        gradient = int(options.weight_gradient_bytes[pair, j] - options.weight_gradient_bytes[pair, now])
        fits = level[held].max() + more <= room and (
            graph.weight_of[pair] == NO_TASK or level[after].max(initial=0) + gradient <= room
        )
        if fits:
            level[held] += more
            level[after] += gradient
            choice[pair] = j
