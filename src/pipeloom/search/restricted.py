"""Graphs restricted to some of their candidates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations, islice

import numpy as np

from pipeloom.taskgraph import Candidate, TaskGraph
from pipeloom.timeline import Schedule
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
