"""A layout as one chain of stages, regardless of modules, as in Megatron."""

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
    """A graph as stages in model order. A stage is a run of consecutive chunks on one rank.

    ``forward`` and ``backward`` have tasks by (stage, microbatch) in running order. A microbatch without tasks in a
    stage has no entry, for example a text-only microbatch, or the backward of a frozen stage.
    """

    rank_of_stage: tuple[int, ...]
    num_microbatches: int
    forward: dict[tuple[int, int], list[int]]
    backward: dict[tuple[int, int], list[int]]

    def stages_of(self, rank: int) -> list[int]:
        """Return the stages of a rank in model order."""
        return [stage for stage, home in enumerate(self.rank_of_stage) if home == rank]


def chain_of(graph: TaskGraph, modules: Sequence[str] | None = None) -> Chain:
    """Read stages and microbatches from the labels of a graph that was made from a layout.

    All sub-microbatches of a microbatch in a stage run consecutively, chunk by chunk. Their backwards run in the
    reverse order, and each W directly follows its I. ``modules`` are the names of the modules to include; None: all.
    """
    if graph.labels is None:
        raise InputError("graph", "has no labels", "baselines need a graph that was made from a layout")
    # Reading labels would construct the names of strategies, which are not needed here.
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
    """Return orders as a `Schedule` in which every pair has its base candidate."""
    candidate = None if graph.candidates is None else np.zeros(graph.num_pairs, np.int64)
    arrays: list[IntArray] = [np.array(tasks, dtype=np.int64) for tasks in order]
    return Schedule(tuple(arrays), candidate, method)
