"""How Megatron sees a layout: one chain of stages, whatever the modules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipeloom.errors import InputError
from pipeloom.taskgraph import NO_TASK, IntArray, TaskGraph
from pipeloom.taskgraph.labels import ChosenLabels
from pipeloom.timeline import Schedule


@dataclass(frozen=True, slots=True)
class Chain:
    """A graph as stages in model order; a stage is a run of consecutive chunks on one rank.

    Attributes
    ----------
    forward, backward : dict
        Tasks by (stage, microbatch) in running order. A microbatch without a part in a stage (text only, or a
        frozen stage's backward) has no entry.
    """

    rank_of_stage: tuple[int, ...]
    num_microbatches: int
    forward: dict[tuple[int, int], list[int]]
    backward: dict[tuple[int, int], list[int]]

    def stages_of(self, rank: int) -> list[int]:
        """Stages that lie on a rank, in model order."""
        return [stage for stage, home in enumerate(self.rank_of_stage) if home == rank]


def chain_of(graph: TaskGraph, modules: Sequence[str] | None = None) -> Chain:
    """Read stages and microbatches from the labels of a graph that was made from a layout.

    ``modules``: only these; default: all. All sub-microbatches that a microbatch has in a stage run one after the
    other, chunk by chunk, their backwards in the opposite order; a W directly follows its I.
    """
    if graph.labels is None:
        raise InputError("graph", "has no labels", "baselines need a graph that was made from a layout")
    # Words for strategies are made when labels are read, and are of no use here.
    labels = graph.labels.given if isinstance(graph.labels, ChosenLabels) else graph.labels
    names = graph.module_names if modules is None else modules
    wanted = [i for i, name in enumerate(graph.module_names) if name in names]
    kept = np.flatnonzero(np.isin(graph.module[graph.forward_of], wanted))
    places = np.array([label[:3] for label in labels], np.int64)  # chunk, microbatch, part
    pairs = kept[np.lexsort(places[kept].T[::-1])].tolist()
    first, second, third = graph.forward_of.tolist(), graph.backward_of.tolist(), graph.weight_of.tolist()
    rank = graph.rank.tolist()
    home = {labels[pair].chunk: rank[first[pair]] for pair in pairs}
    stage_of: dict[int, int] = {}
    ranks: list[int] = []
    for chunk in sorted(home):
        if not ranks or ranks[-1] != home[chunk]:
            ranks.append(home[chunk])
        stage_of[chunk] = len(ranks) - 1
    at = {pair: (stage_of[labels[pair].chunk], labels[pair].microbatch) for pair in pairs}
    forward: dict[tuple[int, int], list[int]] = {}
    backward: dict[tuple[int, int], list[int]] = {}
    for pair in pairs:
        forward.setdefault(at[pair], []).append(first[pair])
    for pair in reversed(pairs):
        for task in (second[pair], third[pair]):
            if task != NO_TASK:
                backward.setdefault(at[pair], []).append(task)
    return Chain(tuple(ranks), 1 + int(places[:, 1].max()), forward, backward)


def as_schedule(graph: TaskGraph, order: list[list[int]], method: str) -> Schedule:
    """Orders as a `Schedule`; every pair gets its base candidate."""
    candidate = None if graph.candidates is None else np.zeros(graph.num_pairs, np.int64)
    arrays: list[IntArray] = [np.array(tasks, dtype=np.int64) for tasks in order]
    return Schedule(tuple(arrays), candidate, method)
