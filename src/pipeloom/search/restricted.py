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
class Restricted:
    """A graph restricted to some candidates, with the mapping to the full graph.

    Attributes
    ----------
    kept : tuple of tuple of int
        Per pair, the numbers in the full graph of the candidates kept.
    """

    graph: TaskGraph
    kept: tuple[tuple[int, ...], ...]

    def schedule(self, found: Schedule) -> Schedule:
        """Convert a schedule of this graph to one of the full graph."""
        assert found.candidate is not None
        choice = [kept[index] for kept, index in zip(self.kept, found.candidate.tolist(), strict=True)]
        return Schedule(found.order, np.array(choice, np.int64), found.method)


def ways_to_stage(graph: TaskGraph) -> Iterator[Restricted]:
    """Settle which ranks offload, where that takes bytes of the rank itself: ranks that must, all, then other sets.

    In each way the staged bytes are taken off the capacity of the ranks that offload, and the candidates of the other
    ranks hold nothing on the host. Ends after `MOST_WAYS`.
    """
    assert graph.candidates is not None
    everything = tuple(tuple(range(len(row))) for row in graph.candidates)
    if graph.staging_bytes is None or graph.capacity_bytes is None:
        yield Restricted(replace(graph, staging_bytes=None), everything)
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


def keeping(graph: TaskGraph, kept: Sequence[tuple[int, ...]]) -> Restricted:
    """Keep some candidates of every pair, in the given order.

    Equal chunks share one row of candidates, and go on sharing where the same are kept.
    """
    assert graph.candidates is not None
    known: dict[tuple[int, tuple[int, ...]], tuple[Candidate, ...]] = {}
    rows = []
    for row, numbers in zip(graph.candidates, kept, strict=True):
        key = id(row), numbers
        if key not in known:
            known[key] = tuple(row[i] for i in numbers)
        rows.append(known[key])
    return Restricted(replace(graph, candidates=tuple(rows)), tuple(kept))
