"""Lower bounds where parts of replicated modules may be assigned to any rank."""

from __future__ import annotations

import numpy as np

from pipeloom.taskgraph import Assignable
from pipeloom.timeline.bounds import extreme_durations, heads_and_tails, lower_bound
from pipeloom.timeline.options import pair_options
from pipeloom.timeline.schedule import LowerBound


def assignable_bound(assignable: Assignable) -> LowerBound:
    """No schedule is faster, under any assignment and any choice of candidates.

    - ``critical path``: the longest path, as if nothing were sent to or from the pairs that can be anywhere.
    - ``head + work + tail``: on some rank, of the pairs that are there in any case.
    - ``all work``: of all ranks together, spread evenly.

    Where nothing can be assigned: `lower_bound`.
    """
    if not assignable.free.any():
        return lower_bound(assignable.graph)
    graph, options = assignable.relaxed, pair_options(assignable.graph)
    duration, _ = extreme_durations(graph, options)
    head, tail = heads_and_tails(graph, duration)
    work = (options.forward_ns + options.backward_ns + options.weight_ns).min(axis=1)
    found = [
        LowerBound(int((head + duration + tail).max()), "critical path"),
        LowerBound(-(-int(work.sum()) // graph.num_ranks), "all work"),
    ]
    fixed = ~assignable.free
    for rank in range(graph.num_ranks):
        pairs = fixed & (assignable.assignment == rank)
        tasks = np.flatnonzero(pairs[graph.pair])
        if tasks.size:
            ends = int(head[tasks].min()) + int(tail[tasks].min())
            found.append(LowerBound(ends + int(work[pairs].sum()), "head + work + tail"))
    return max(found, key=lambda bound: bound.ns)
