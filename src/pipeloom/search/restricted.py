"""Graphs restricted to some of their candidates: by the ranks that offload, or by which backwards are split.

If backwards are split, ranks that would be idle at the end compute weight gradients there, and input gradients arrive
earlier. This pays off only for the last microbatches. Splitting has a cost, since both parts repeat some computation,
so the other microbatches should not be split.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations, islice

import numpy as np

from pipeloom.taskgraph import NO_TASK, BoolArray, Candidate, IntArray, TaskGraph
from pipeloom.timeline import Schedule, Timeline
from pipeloom.timeline.options import pair_options, usable

MOST_WAYS = 20
"""Maximum number of sets of staging ranks to try."""


@dataclass(frozen=True, slots=True, eq=False)
class RestrictedGraph:
    """A graph restricted to some candidates. ``kept`` are their numbers in the full graph, by pair."""

    graph: TaskGraph
    kept: tuple[tuple[int, ...], ...]

    def schedule(self, found: Schedule) -> Schedule:
        """Convert a schedule of this graph to one of the full graph."""
        assert found.candidate is not None
        choice = [kept[index] for kept, index in zip(self.kept, found.candidate.tolist(), strict=True)]
        return Schedule(found.order, np.array(choice, np.int64), found.method)


def ways_to_stage(graph: TaskGraph) -> Iterator[RestrictedGraph]:
    """Yield a restricted graph for each choice of the ranks that offload, if offloading needs staging memory.

    The first choice is only the ranks that must offload, the second is all ranks, and then other sets follow, up to
    `MOST_WAYS`. Staging bytes are subtracted from the capacity of ranks that offload. The candidates of other ranks
    hold no bytes on the host.
    """
    assert graph.candidates is not None
    everything = tuple(tuple(range(len(row))) for row in graph.candidates)
    if graph.staging_bytes is None or graph.capacity_bytes is None:
        yield RestrictedGraph(replace(graph, staging_bytes=None), everything)
        return
    home, options = graph.rank[graph.forward_of], pair_options(graph)
    fits, away = usable(graph, options), options.host_bytes > 0
    may = (graph.staging_bytes > 0) & (np.bincount(home, (fits & away).any(axis=1), graph.num_ranks) > 0)
    must = may & (np.bincount(home, ~(fits & ~away).any(axis=1), graph.num_ranks) > 0)
    open_ranks = np.flatnonzero(may & ~must).tolist()
    sets = chain([(), tuple(open_ranks)], *(combinations(open_ranks, size) for size in range(1, len(open_ranks))))
    for offloading in islice(sets, MOST_WAYS if open_ranks else 1):
        staged = must.copy()
        staged[list(offloading)] = True
        barred = ((graph.staging_bytes > 0) & ~staged)[home].tolist()
        kept = [
            tuple(i for i, option in enumerate(row) if not (stays and option.host_bytes))
            for row, stays in zip(graph.candidates, barred, strict=True)
        ]
        way = keeping(graph, kept)
        capacity = graph.capacity_bytes - np.where(staged, graph.staging_bytes, 0)
        yield replace(way, graph=replace(way.graph, capacity_bytes=capacity, staging_bytes=None))


def keeping(graph: TaskGraph, kept: Sequence[tuple[int, ...]]) -> RestrictedGraph:
    """Keep some candidates of every pair, in the given order.

    Equal chunks share one row of candidates. They still share a row if the same candidates are kept.
    """
    assert graph.candidates is not None
    known: dict[tuple[int, tuple[int, ...]], tuple[Candidate, ...]] = {}
    rows = []
    for row, numbers in zip(graph.candidates, kept, strict=True):
        key = id(row), numbers
        if key not in known:
            known[key] = tuple(row[i] for i in numbers)
        rows.append(known[key])
    return RestrictedGraph(replace(graph, candidates=tuple(rows)), tuple(kept))


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


def restrict_splits(graph: TaskGraph, split: BoolArray) -> RestrictedGraph:
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
