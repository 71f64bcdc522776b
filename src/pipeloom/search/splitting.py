"""Choose which backwards to split, if pairs can run their backward whole or as input and weight gradient.

If backwards are split, ranks that would be idle at the end compute weight gradients there, and input gradients arrive
earlier. This pays off only for the last microbatches. Splitting has a cost, since both parts repeat some computation,
so the other microbatches should not be split.
"""

from __future__ import annotations

import numpy as np

from pipeloom.search.restricted import RestrictedGraph, keeping
from pipeloom.taskgraph import NO_TASK, IntArray, TaskGraph
from pipeloom.timeline import Timeline
from pipeloom.timeline.options import BoolArray, pair_options, usable


def splittable(graph: TaskGraph) -> BoolArray:
    """Return which pairs have both a candidate with a whole backward and one with a split backward.

    A backward is whole if its weight gradient has no duration. Candidates that do not fit alone do not count.
    """
    if graph.candidates is None:
        return np.zeros(graph.num_pairs, np.bool_)
    options = pair_options(graph)
    fits, whole = usable(graph, options), options.weight_ns == 0
    answer: BoolArray = (fits & whole).any(axis=1) & (fits & ~whole).any(axis=1) & (graph.weight_of != NO_TASK)
    return answer


def restrict(graph: TaskGraph, split: BoolArray) -> RestrictedGraph:
    """Keep only the split candidates of a splittable pair, or only the whole ones."""
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
    """Return the numbers of microbatches to split, in the order in which to try them."""
    total, ranks = len(np.unique(graph.microbatch)), graph.num_ranks
    wanted = [0, ranks, 2 * ranks, -(-ranks // 2), 4 * ranks, total]
    return list(dict.fromkeys(min(count, total) for count in wanted))


def by_lateness(graph: TaskGraph, timeline: Timeline) -> IntArray:
    """Return for every pair the place of its microbatch. Place 0 is the microbatch whose last backward begins last."""
    names, of_pair = np.unique(graph.microbatch[graph.forward_of], return_inverse=True)
    last = np.zeros(len(names), np.int64)
    has = graph.backward_of != NO_TASK
    np.maximum.at(last, of_pair[has], timeline.start_ns[graph.backward_of[has]])
    place = np.empty(len(names), np.int64)
    place[np.argsort(-last, kind="stable")] = np.arange(len(names))
    answer: IntArray = place[of_pair]
    return answer
