"""Rules of 1F1B and zero-bubble schedules."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pipeloom.search.lists import Chunks, Priorities, chunks_of, priorities_of
from pipeloom.search.rule import ChunkRule, OrderRule
from pipeloom.search.starts.start import Start, turns_of
from pipeloom.search.state import Search
from pipeloom.taskgraph import NO_TASK, TaskGraph

_FIRST = 1e6
"""Units by which one kind of task goes before all others."""


class StandardRules(Start):
    """1F1B and, if backwards are split, zero-bubble H1 and H2, with microbatches in their order."""

    name = "standard rules"

    @classmethod
    def propose(cls, search: Search) -> Iterator[Priorities]:
        """Yield the rules that the graph's placement allows."""
        chunks = chunks_of(search.graph)
        if chunks is None:
            return
        turn = turns_of(search.groups)["first in, first out"]
        for rule in standard_rules(search.graph, chunks):
            yield priorities_of(search.graph, search.packed, chunks, rule, turn)


def standard_rules(graph: TaskGraph, chunks: Chunks) -> Iterator[OrderRule]:
    """Yield the rules of 1F1B and, if backwards are split, of zero-bubble H1 and H2 (Qi et al. 2024).

    Each rank must have one run of chunks. Backwards run first. A stage with s stages behind it runs s forwards ahead,
    and twice as many in H2. 1F1B runs weight gradients at once; H1 and H2 run them if a rank would be idle.
    """
    home = np.zeros(int(chunks.label.max()) + 1, np.int64)
    home[chunks.label] = chunks.rank
    if len(np.unique(chunks.label)) < len(chunks.label):
        return  # parts of one chunk on several ranks
    present = np.sort(chunks.label)
    stage = np.concatenate([[0], np.cumsum(np.diff(home[present]) != 0)])
    num = int(stage[-1]) + 1
    if num > len(np.unique(chunks.rank)):
        return
    depth = dict(zip(present.tolist(), (num - stage).tolist(), strict=True))
    forms = [(1, 0, -_FIRST)]
    if (graph.weight_of != NO_TASK).any():
        forms += [(1, 0, _FIRST), (2, 1, _FIRST)]
    for times, less, weight in forms:
        yield OrderRule(
            tuple(
                ChunkRule((0, 0), int(rank), 0.0, -_FIRST, weight, limit=max(1, times * depth.get(label, 1) - less))
                for label, rank in enumerate(home)
            )
        )
