"""Which backwards to split, where a pair may run its backward whole or as input and weight gradient.

Split backwards let ranks that would be idle at the end do weight gradients there, and the gradients of the inputs
arrive earlier. That pays for the last microbatches only; splitting has a price (what both parts compute), so it
should not be paid for the others.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pipeloom.search.restricted import Restricted, keeping
from pipeloom.taskgraph import NO_TASK, IntArray, TaskGraph
from pipeloom.timeline import Timeline
from pipeloom.timeline.options import pair_options, usable

BoolArray = npt.NDArray[np.bool_]


def splittable(graph: TaskGraph) -> BoolArray:
    """Pairs that have a candidate with a whole backward (a weight gradient of no time), and one without.

    Candidates that do not fit alone do not count.
    """
    if graph.candidates is None:
        return np.zeros(graph.num_pairs, np.bool_)
    options = pair_options(graph)
    fits, whole = usable(graph, options), options.weight_ns == 0
    answer: BoolArray = (fits & whole).any(axis=1) & (fits & ~whole).any(axis=1) & (graph.weight_of != NO_TASK)
    return answer


def restrict(graph: TaskGraph, split: BoolArray) -> Restricted:
    """Keep of every splittable pair only the candidates that are split, or only those that are whole."""
    assert graph.candidates is not None
    can = splittable(graph)
    known: dict[tuple[int, bool, bool], tuple[int, ...]] = {}
    kept = []
    for pair, row in enumerate(graph.candidates):
        key = (id(row), bool(can[pair]), bool(split[pair]))
        if key not in known:
            known[key] = tuple(i for i, o in enumerate(row) if not can[pair] or (o.weight_ns > 0) == split[pair])
        kept.append(known[key])
    return keeping(graph, kept)


def split_counts(graph: TaskGraph) -> list[int]:
    """Numbers of microbatches to split, to be tried in this order: those near the number of ranks first."""
    total, ranks = len(np.unique(graph.microbatch)), graph.num_ranks
    wanted = [0, ranks, 2 * ranks, -(-ranks // 2), 4 * ranks, total]
    return list(dict.fromkeys(min(count, total) for count in wanted))


def by_lateness(graph: TaskGraph, timeline: Timeline) -> IntArray:
    """Return the place of every pair's microbatch; the one whose last backward begins last has place 0."""
    names, of_pair = np.unique(graph.microbatch[graph.forward_of], return_inverse=True)
    last = np.zeros(len(names), np.int64)
    has = graph.backward_of != NO_TASK
    np.maximum.at(last, of_pair[has], timeline.start_ns[graph.backward_of[has]])
    place = np.empty(len(names), np.int64)
    place[np.argsort(-last, kind="stable")] = np.arange(len(names))
    answer: IntArray = place[of_pair]
    return answer
