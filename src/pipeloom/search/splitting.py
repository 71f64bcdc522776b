"""Which backwards to split, where a pair may run its backward whole or as input and weight gradient.

Split backwards let ranks that would be idle at the end do weight gradients there, and the gradients of the inputs
arrive earlier. That pays for the last microbatches only; splitting has a price (what both parts compute), so it
should not be paid for the others.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from pipeloom.taskgraph import NO_TASK, Candidate, IntArray, TaskGraph
from pipeloom.timeline import Schedule, Timeline

BoolArray = npt.NDArray[np.bool_]


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


def splittable(graph: TaskGraph) -> BoolArray:
    """Pairs that have a candidate with a whole backward (a weight gradient of no time), and one without."""
    answer = np.zeros(graph.num_pairs, np.bool_)
    if graph.candidates is not None:
        for pair in np.flatnonzero(graph.weight_of != NO_TASK).tolist():
            whole = [option.weight_ns == 0 for option in graph.candidates[pair]]
            answer[pair] = any(whole) and not all(whole)
    return answer


def restrict(graph: TaskGraph, split: BoolArray) -> Restricted:
    """Keep of every splittable pair only the candidates that are split, or only those that are whole."""
    assert graph.candidates is not None
    can = splittable(graph)
    # Equal chunks share one row of candidates, and go on sharing.
    known: dict[tuple[int, bool, bool], tuple[tuple[int, ...], tuple[Candidate, ...]]] = {}
    both = []
    for pair, row in enumerate(graph.candidates):
        key = (id(row), bool(can[pair]), bool(split[pair]))
        if key not in known:
            keep = tuple(i for i, option in enumerate(row) if not can[pair] or (option.weight_ns > 0) == split[pair])
            known[key] = keep, tuple(row[i] for i in keep)
        both.append(known[key])
    kept, rows = tuple(keep for keep, _ in both), tuple(row for _, row in both)
    return Restricted(replace(graph, candidates=rows), kept)


def split_counts(graph: TaskGraph) -> list[int]:
    """Numbers of microbatches to split, to be tried in this order: those near the number of ranks first."""
    total, ranks = len(np.unique(graph.microbatch)), graph.num_ranks
    wanted = [0, ranks, 2 * ranks, -(-ranks // 2), 4 * ranks, total]
    return list(dict.fromkeys(min(count, total) for count in wanted))


def by_lateness(graph: TaskGraph, timeline: Timeline) -> IntArray:
    """Place of every pair's microbatch, the one whose last backward begins last having place 0."""
    names, of_pair = np.unique(graph.microbatch[graph.forward_of], return_inverse=True)
    last = np.zeros(len(names), np.int64)
    has = graph.backward_of != NO_TASK
    np.maximum.at(last, of_pair[has], timeline.start_ns[graph.backward_of[has]])
    place = np.empty(len(names), np.int64)
    place[np.argsort(-last, kind="stable")] = np.arange(len(names))
    answer: IntArray = place[of_pair]
    return answer
