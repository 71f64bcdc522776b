"""Lower bounds where parts of replicated modules may be assigned to any rank."""

from __future__ import annotations

import numpy as np

from pipeloom.taskgraph import Assignable, IntArray
from pipeloom.timeline.bounds import extreme_durations, heads_and_tails, lower_bound
from pipeloom.timeline.options import pair_options
from pipeloom.timeline.schedule import LowerBound


def assignable_bound(assignable: Assignable) -> LowerBound:
    """No schedule is faster, under any assignment and any choice of candidates.

    - ``critical path``: the longest path, as if nothing were sent to or from the pairs that can be anywhere.
    - ``head + work + tail``: on some rank, of the pairs that are there in any case.
    - ``all work``: of all ranks together, spread evenly, or by their speeds.

    Where nothing can be assigned: `lower_bound`.
    """
    if not assignable.free.any():
        return lower_bound(assignable.graph)
    graph = assignable.relaxed
    options = pair_options(graph)
    duration, _ = extreme_durations(graph, options)
    head, tail = heads_and_tails(graph, duration)
    work = (options.forward_ns + options.backward_ns + options.weight_ns).min(axis=1)
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
            found.append(LowerBound(ends + int(work[pairs].sum()), "head + work + tail"))
    return max(found, key=lambda bound: bound.ns)


def _all_work(assignable: Assignable, work: IntArray) -> int:
    """Nanoseconds of all work, shape (num_pairs,), if every rank did as much of it as its speed says."""
    graph, slowness = assignable.graph, assignable.slowness
    if not assignable.options:
        return -(-int(work.sum()) // graph.num_ranks)
    # What a rank has done by the end, weighed by its speed, is no less than that where each pair weighs least. What a
    # slow rank takes as long for as others (copies to the host) weighs least on the slowest.
    slowest = int(slowness.argmax())
    options = pair_options(assignable.as_if_on(slowest))
    weighed = (options.forward_ns + options.backward_ns + options.weight_ns).min(axis=1)
    rank = np.where(assignable.free, slowest, assignable.assignment)
    # Times of tasks are rounded.
    total = float((weighed / slowness[rank]).sum()) - graph.num_tasks / float(slowness.min())
    return max(0, int(total / float((1 / slowness).sum())))
