"""Lower bounds where parts of replicated modules may be dealt to any rank."""

from __future__ import annotations

import numpy as np

from pipeloom.taskgraph import Dealable
from pipeloom.timeline.bounds import extreme_durations, heads_and_tails, lower_bound
from pipeloom.timeline.options import pair_options
from pipeloom.timeline.schedule import LowerBound


def dealt_bound(dealable: Dealable) -> LowerBound:
    """No schedule is faster, under any dealing and any choice of candidates.

    - ``critical path``: the longest path, as if nothing were sent to or from the pairs that can be anywhere.
    - ``head + work + tail``: on some rank, of the pairs that are there in any case.
    - ``all work``: of all ranks together, spread evenly.

    Where nothing can be dealt: `lower_bound`.
    """
    if not dealable.free.any():
        return lower_bound(dealable.graph)
    graph, options = dealable.relaxed, pair_options(dealable.graph)
    duration, _ = extreme_durations(graph, options)
    head, tail = heads_and_tails(graph, duration)
    work = (options.forward_ns + options.backward_ns + options.weight_ns).min(axis=1)
    found = [
        LowerBound(int((head + duration + tail).max()), "critical path"),
        LowerBound(-(-int(work.sum()) // graph.num_ranks), "all work"),
    ]
    fixed = ~dealable.free
    for rank in range(graph.num_ranks):
        pairs = fixed & (dealable.dealing == rank)
        tasks = np.flatnonzero(pairs[graph.pair])
        if tasks.size:
            ends = int(head[tasks].min()) + int(tail[tasks].min())
            found.append(LowerBound(ends + int(work[pairs].sum()), "head + work + tail"))
    return max(found, key=lambda bound: bound.ns)
