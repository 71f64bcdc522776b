"""A lower bound under every assignment of sub-microbatches of replicated modules to ranks."""

from __future__ import annotations

import numpy as np

from pipeloom.taskgraph import Assignable, IntArray
from pipeloom.timeline.bounds.bound import extreme_durations, longest_paths
from pipeloom.timeline.options import pair_options
from pipeloom.timeline.schedule import LowerBound


def bound_of_any_assignment(assignable: Assignable) -> LowerBound:
    """Return a lower bound under every assignment and every choice of candidates.

    - ``critical path``: the longest path without delays to or from free pairs.
    - ``warm-up + work + cool-down``: on some rank, of the pairs that are fixed to it.
    - ``all work``: the work of all ranks, spread evenly or by their speeds.
    """
    graph = assignable.relaxed
    options = pair_options(graph)
    duration, _ = extreme_durations(graph, options)
    head, tail = longest_paths(graph, duration)
    work = options.total_ns.min(axis=1)
    found = [
        LowerBound(int((head + duration + tail).max()), "critical path"),
        LowerBound(_all_work(assignable, work), "all work"),
    ]
    fixed = ~assignable.free
    for rank in range(graph.num_ranks):
        pairs = fixed & (assignable.assignment == rank)
        tasks = np.flatnonzero(pairs[graph.pair])
        if tasks.size:
            ends = int(head[tasks].min()) + int(tail[tasks].min())
            found.append(LowerBound(ends + int(work[pairs].sum()), "warm-up + work + cool-down"))
    return max(found, key=lambda bound: bound.ns)


def _all_work(assignable: Assignable, work: IntArray) -> int:
    """Return the time for all work if it is divided by the speeds of the ranks; ``work`` has shape (num_pairs,)."""
    graph, slowness = assignable.graph, assignable.slowness
    if not assignable.options:
        return -(-int(work.sum()) // graph.num_ranks)
    # Weigh work by the speed of its rank. Each pair weighs least on the slowest rank, since some work (copies to the
    # host) takes equally long on all ranks.
    slowest = int(slowness.argmax())
    weighed = pair_options(assignable.with_speed_of(slowest)).total_ns.min(axis=1)
    rank = np.where(assignable.free, slowest, assignable.assignment)
    # Durations are rounded, by less than 1 ns per task.
    total = float((weighed / slowness[rank]).sum()) - graph.num_tasks / float(slowness.min())
    return max(0, int(total / float((1 / slowness).sum())))
