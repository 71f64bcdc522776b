"""Graphs with some of their candidates left out, and the way back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from pipeloom.taskgraph import Candidate, TaskGraph
from pipeloom.timeline import Schedule


@dataclass(frozen=True, slots=True, eq=False)
class Restricted:
    """A graph with some of its candidates left out, and the way back.

    Attributes
    ----------
    graph : TaskGraph
    kept : tuple of tuple of int
        Per pair, the numbers in the full graph of the candidates kept.
    """

    graph: TaskGraph
    kept: tuple[tuple[int, ...], ...]

    def schedule(self, found: Schedule) -> Schedule:
        """A schedule of this graph, as one of the full graph."""
        assert found.candidate is not None
        choice = [kept[index] for kept, index in zip(self.kept, found.candidate.tolist(), strict=True)]
        return Schedule(found.order, np.array(choice, np.int64), found.method)


def keeping(graph: TaskGraph, kept: Sequence[tuple[int, ...]]) -> Restricted:
    """Keep some candidates of every pair, in the order that they are given in.

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
